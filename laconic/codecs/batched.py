"""Batched: all tensors of a bucket as one square matrix."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.codecs.contract import Codec, check_codec
from laconic.codecs.packing import pack, unpack
from laconic.comm.requests import Averaged, Exchange, State, Tensors
from laconic.values import as_code


@dataclass(frozen=True, repr=False)
class Batched:
    """All tensors of a bucket, laid side by side and padded with zeros, as one square matrix.

    Fewer and larger operations, but rows and columns no longer mean anything, so a low rank keeps less:
    `LowRank` by itself is the better choice unless its many small products cost too much.
    """

    codec: Codec

    __repr__ = as_code

    def __post_init__(self) -> None:
        check_codec(f"Batched({self.codec!r})", self.codec)

    def accepts(self, shape: torch.Size) -> bool:
        """Accept every shape."""
        return True

    def average(self, tensors: Tensors, state: State, *, reuse: bool = False) -> Exchange:
        """Average the one square matrix that holds `tensors`."""
        flat = pack(tensors)
        side = side_of(flat.numel())
        if not side:
            return Averaged({name: t.clone() for name, t in tensors.items()}, lambda: dict(tensors), _true)
        square = flat.new_zeros(side * side)
        square[: flat.numel()] = flat
        name = name_of(tensors)
        end = yield from self.codec.average({name: square.view(side, side)}, state, reuse=reuse)

        def cut(whole: Tensor) -> dict[str, Tensor]:
            return unpack(whole.reshape(-1)[: flat.numel()], like=tensors)

        return Averaged(cut(end.mean[name]), lambda: cut(end.own()[name]), end.finite)


def side_of(numel: int) -> int:
    """Tell how long the side of the square for `numel` numbers is.

    >>> side_of(9), side_of(10), side_of(0)
    (3, 4, 0)
    """
    return math.isqrt(numel - 1) + 1 if numel else 0


def _true() -> Tensor:
    return torch.tensor(True)


def name_of(tensors: Tensors) -> str:
    """Name a bucket by what is in it, so that its state is found again in the same layout only."""
    digest = hashlib.sha256("\n".join(tensors).encode()).hexdigest()[:16]
    return f"bucket of {len(tensors)} ({digest})"
