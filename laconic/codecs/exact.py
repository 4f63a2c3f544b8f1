"""Codecs that send every number: in its own dtype, or in half the bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from laconic.codecs.contract import accept_every_shape
from laconic.exchange import Averaged, Exchange, Mean, Peers, State, Tensors, all_finite
from laconic.kernels.choose import can_collect
from laconic.packing import on_cuda, pack, unpack
from laconic.values import as_code


@dataclass(frozen=True, repr=False)
class Exact:
    """Sends every number in its own dtype, in one round, as DDP does.

    With `wide`, the sum is taken in a wider dtype, so that equal replicas stay bit-equal.
    """

    wide: bool = False

    __repr__ = as_code
    accepts = accept_every_shape

    def __post_init__(self) -> None:
        if not isinstance(self.wide, bool):
            raise ValueError(f"Exact(wide={self.wide!r}): wide must be True or False.")

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        """Average `tensors` as they are."""
        if reuse and on_cuda(tensors) and can_collect(tensors):
            return (yield from self._collected(tensors, state))
        flat = pack(tensors, alias=reuse)
        if flat.numel():  # no collective for an empty tensor
            flat = yield Mean(flat, wide=self.wide)
        mean = unpack(flat, like=tensors)
        return Averaged(mean, lambda: dict(tensors), lambda: all_finite({"": flat}))

    def _collected(self, tensors: Tensors, state: State) -> Exchange[Averaged]:
        """Average many small CUDA tensors: one launch copies them into one message, one launch copies the mean back."""
        from laconic.kernels.cuda.collect import Collection  # needs Triton

        known: dict[tuple[str, ...], Collection] = state.setdefault("_collected", {})
        names = tuple(tensors)
        collection = known.get(names)
        if collection is None or not collection.fits(tensors):
            collection = known[names] = Collection(tensors)
        flat = yield Mean(collection.gather(tensors), wide=self.wide)
        collection.scatter(flat)
        return Averaged(dict(tensors), lambda: dict(tensors), lambda: all_finite({"": flat}))


@dataclass(frozen=True, repr=False)
class Cast:
    """Sends every number in half the bits: `Cast("bf16")` or `Cast("fp16")`.

    bf16 keeps the range and 8 bits of precision; fp16 keeps 11 bits, but values above 65504 overflow.
    """

    to: Literal["bf16", "fp16"]

    __repr__ = as_code
    accepts = accept_every_shape

    def __post_init__(self) -> None:
        if self.to not in ("bf16", "fp16"):
            raise ValueError(f'Cast({self.to!r}): the type must be "bf16" or "fp16". To send all bits, use Exact().')

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the messages."""
        return torch.bfloat16 if self.to == "bf16" else torch.float16

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        """Average `tensors` rounded to the smaller dtype."""
        flat = pack({name: t.to(self.dtype) for name, t in tensors.items()})
        if flat.numel():
            flat = yield Mean(flat)
        mean = {name: t.to(tensors[name].dtype) for name, t in unpack(flat, like=tensors).items()}

        def own() -> dict[str, Tensor]:
            return {name: t.to(self.dtype).to(t.dtype) for name, t in tensors.items()}

        return Averaged(mean, own, lambda: all_finite({"": flat}))
