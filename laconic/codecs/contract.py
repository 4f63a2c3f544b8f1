"""The contract of a codec: one generator, no I/O."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from laconic.exchange import Averaged, Exchange, Peers, State, Tensors


@runtime_checkable
class Codec(Protocol):
    """How tensors are encoded for the network and averaged.

    A codec is a frozen value. What it keeps between calls is in `state`, a plain dict that starts empty and is keyed by
    parameter name. One state serves all buckets of a model, whatever their layout.
    """

    def accepts(self, shape: torch.Size) -> bool:
        """Return whether this codec can encode a tensor of `shape`, and makes it smaller. The rest is sent exactly."""
        ...

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        """Average `tensors` with all other workers; `peers` says which worker this is, and among how many.

        The tensors share one dtype and device. The codec does not change them, unless `reuse` lets it overwrite their
        memory: the caller must then not ask for `own()`, which may read that memory. A codec that keeps something asks
        `Decide` at its end, and changes `state` only if the answer is true.
        """
        ...


def accept_every_shape(codec: object, shape: torch.Size) -> bool:
    """Return True: the method `accepts` of codecs for all shapes."""
    return True


def keep_if(ok: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return `new` if the 0-d bool `ok` is true, else `old`, without waiting for an accelerator."""
    if ok.device.type == "cpu":
        return new if bool(ok) else old
    return torch.where(ok, new, old)


def check_codec(what: str, codec: object) -> None:
    """Raise a TypeError if `codec` is not a codec. `what` is the call as the user wrote it."""
    if not isinstance(codec, Codec) or isinstance(codec, type):
        raise TypeError(f"{what}: {codec!r} is not a codec. Pass one, such as Exact() or LowRank(rank=4).")


def check_rest(what: str, rest: Codec) -> None:
    """Raise a ValueError unless `rest` accepts every shape."""
    if not all(rest.accepts(torch.Size(shape)) for shape in ([], [2], [2, 2])):
        raise ValueError(
            f"{what}(rest={rest}): rest gets what the other codecs decline, so it must accept every shape, "
            "as Exact() and Cast(...) do."
        )
