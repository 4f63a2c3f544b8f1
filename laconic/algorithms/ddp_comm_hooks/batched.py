"""Batched: encode all tensors of a bucket as one square matrix."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from laconic.codecs.contract import Codec, accept_every_shape, check_codec
from laconic.exchange import Averaged, Exchange, Peers, State, Tensors, true
from laconic.packing import pack, unpack
from laconic.values import as_code


@dataclass(frozen=True, repr=False)
class Batched:
    """Concatenates all tensors of a bucket, pads them with zeros, and encodes them as one square matrix.

    This takes fewer and larger operations. But the rows and columns of that matrix have no meaning, so a low rank keeps
    less of it: prefer plain `LowRank` unless its many small products cost too much.
    """

    codec: Codec

    __repr__ = as_code
    accepts = accept_every_shape

    def __post_init__(self) -> None:
        check_codec(f"Batched({self.codec!r})", self.codec)

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        """Average the square matrix that holds `tensors`."""
        flat = pack(tensors)
        side = side_of(flat.numel())
        if not side:
            return Averaged({name: t.clone() for name, t in tensors.items()}, lambda: dict(tensors), true)
        square = flat.new_zeros(side * side)
        square[: flat.numel()] = flat
        name = name_of(tensors)
        end = yield from self.codec.average({name: square.view(side, side)}, state, peers, reuse=reuse)

        def cut(whole: Tensor) -> dict[str, Tensor]:
            return unpack(whole.reshape(-1)[: flat.numel()], like=tensors)

        return Averaged(cut(end.mean[name]), lambda: cut(end.own()[name]), end.finite, end.decided)


def side_of(numel: int) -> int:
    """Return the side of the smallest square that holds `numel` numbers.

    >>> side_of(9), side_of(10), side_of(0)
    (3, 4, 0)
    """
    return math.isqrt(numel - 1) + 1 if numel else 0


def name_of(names: Collection[str]) -> str:
    """Return a name made from the names of tensors: the state belongs to one layout of the bucket only."""
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    return f"bucket of {len(names)} ({digest})"
