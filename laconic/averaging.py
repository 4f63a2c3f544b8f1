"""Averaging tensors in place: the one routine behind weights rounds and model averagers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laconic.buckets import cut, in_buckets, overlapping, pack, same_memory, side_by_side, unpack
from laconic.wires import letters
from laconic.wires.group import Conductor
from laconic.wires.wire import Averaged, Exchange, Mean, Means, Questions, all_finite

LARGE = 1 << 20
"""Tensors of this many bytes travel from their own memory; to gather smaller ones costs less than their latency."""

BUCKET = 10 << 20
"""What travels in one collective, in bytes: a piece of a large tensor, or small ones gathered. Up to three are on their
way, and with them what others said of two: copies of all these are two of DDP's buckets. Letters have their own."""


def average_in_place(conductor: Conductor, tensors: Mapping[str, Tensor], phase: str = "weights") -> None:
    """Replace each tensor by its mean over the workers, and wait for it.

    Tensors keep their storage, strides and dtype; each dtype travels by itself; sums are taken so that equal
    replicas stay bit-equal. Large tensors are averaged where they are: a failure on the way leaves some with their
    means, some without, and those under way with neither. At most two of DDP's buckets are used in extra memory.
    """
    if conductor.workers == 1:
        return
    tensors = {name: t.detach() for name, t in tensors.items()}
    by_letter = {name: t for name, t in tensors.items() if conductor.writes_letters and t.device.type == "cpu"}
    if sum(t.nbytes for t in by_letter.values()) < LARGE:
        by_letter = {}
    parts = list(pieces_of(by_letter, letters.GROUP))
    others = in_turn({name: t for name, t in tensors.items() if name not in by_letter})
    run_all(conductor, [*([means_of(parts)] if parts else []), *others], phase)


@dataclass(frozen=True, eq=False)
class Piece:
    """Tensors of one dtype that travel together, or a piece of a large one: a `Part`."""

    tensors: Mapping[str, Tensor]
    in_place: bool = False
    """Whether the mean may be written over them before all of it is there."""

    @property
    def dtype(self) -> torch.dtype:
        """What they hold."""
        return next(iter(self.tensors.values())).dtype

    @cached_property
    def nbytes(self) -> int:
        """How much travels."""
        return sum(t.nbytes for t in self.tensors.values())

    @cached_property
    def _where_it_is(self) -> Tensor | None:
        return side_by_side(self.tensors.values()) if self.in_place else None

    @property
    def copied(self) -> bool:
        """Whether they must be copied, for they are not side by side in memory, or not alone."""
        return self._where_it_is is None

    def open(self) -> Tensor:
        """Lay them side by side."""
        return pack(self.tensors) if self._where_it_is is None else self._where_it_is

    def close(self, mean: Tensor) -> None:
        """Write the mean over them."""
        if mean.data_ptr() != next(iter(self.tensors.values())).data_ptr():
            with torch.no_grad():
                torch._foreach_copy_(list(self.tensors.values()), list(unpack(mean, like=self.tensors).values()))


def pieces_of(tensors: Mapping[str, Tensor], cap_bytes: int) -> Iterator[Piece]:
    """Divide tensors into pieces, by their shapes and dtypes alone, which all workers share.

    Memory decides only what is done with a piece here: one that is not contiguous, or lies on another's memory, is
    averaged in a copy and written back.
    """
    tied = overlapping(tensors)
    for name, t in tensors.items():
        if t.nbytes >= LARGE:
            for piece in cut(t, cap_bytes):
                yield Piece({name: piece}, in_place=name not in tied)
    small = {name: t for name, t in tensors.items() if 0 < t.nbytes < LARGE}
    for names in in_buckets(small, cap_bytes):
        yield Piece({name: small[name] for name in names})


def means_of(pieces: Sequence[Piece]) -> Questions:
    """Average pieces worker to worker, exactly, and write the means over them."""
    yield Means(pieces)
    tensors = {str(place): t for place, t in enumerate(t for piece in pieces for t in piece.tensors.values())}
    return Averaged(tensors, dict, lambda: all_finite(tensors))


def in_turn(tensors: Mapping[str, Tensor]) -> Iterator[Exchange]:
    """Divide tensors into exchanges, a collective each."""
    return (mean_of(piece) for piece in pieces_of(tensors, BUCKET))


def mean_of(piece: Piece) -> Exchange:
    """Average one piece, exactly, and write the means over it."""
    flat = piece.open()
    if flat.numel():  # no collective for nothing
        flat = yield Mean(flat, wide=True)
    piece.close(flat)
    return Averaged(dict(piece.tensors), dict, lambda: all_finite(piece.tensors))


def written(exchange: Exchange, into: Mapping[str, Tensor]) -> Exchange:
    """Let an exchange end by writing its means over `into`."""
    end = yield from exchange
    if end.mean is not into:
        write(into, end.mean)
    return end


def write(into: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values over tensors of the same names, unless they are there already."""
    moved = [name for name, t in into.items() if t is not values[name] and not same_memory(t, values[name])]
    if moved:
        with torch.no_grad():
            torch._foreach_copy_([into[name] for name in moved], [values[name] for name in moved])


def run_all(conductor: Conductor, exchanges: Iterable[Questions], phase: str) -> None:
    """Run exchanges together, and wait for all of them."""
    nothing = torch.empty(0)
    futures = [conductor.submit(exchange, phase, nothing) for exchange in exchanges]
    conductor.flush()
    for future in futures:
        future.wait()
