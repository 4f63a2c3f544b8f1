"""The contract of a codec: one generator, no I/O."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from laconic.comm.requests import Exchange, State, Tensors


@runtime_checkable
class Codec(Protocol):
    """How tensors are said to the other workers.

    A codec is a frozen value; what it remembers lives in `state`, a plain dict that starts empty and is keyed
    by parameter name. One state serves all buckets of a model, whatever their layout.
    """

    def accepts(self, shape: torch.Size) -> bool:
        """Tell whether this codec can carry a tensor of `shape`, and gains by it. What it declines travels exactly."""
        ...

    def average(self, tensors: Tensors, state: State, *, reuse: bool = False) -> Exchange:
        """Average `tensors` with all other workers.

        The tensors share one dtype and device. They are left untouched, unless `reuse` gives their memory to the
        codec. `state` changes only at the end, and only if what arrived was finite.
        """
        ...


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype for arithmetic and residuals: float32, or float64 for float64.

    >>> wide_dtype(torch.bfloat16), wide_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def keep_if(ok: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Choose `new` if the 0-d bool `ok` is true, else `old`; without waiting for an accelerator."""
    if ok.device.type == "cpu":
        return new if bool(ok) else old
    return torch.where(ok, new, old)


def check_codec(what: str, codec: object) -> None:
    """Refuse what is no codec, where one is to be wrapped. `what` is the call as the user wrote it."""
    if not isinstance(codec, Codec) or isinstance(codec, type):
        raise TypeError(f"{what}: a codec is needed, such as Exact() or LowRank(rank=4), and {codec!r} is none.")
