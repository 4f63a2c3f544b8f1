"""Averaging tensors in place: the one routine behind weights rounds and model averagers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from laconic.buckets import cut, in_buckets, overlapping, pack, same_memory, unpack
from laconic.wires.group import Conductor
from laconic.wires.wire import Averaged, Exchange, Mean, all_finite

LARGE = 1 << 20
"""Tensors of this many bytes travel from their own memory; to gather smaller ones costs less than their latency."""

BUCKET = 10 << 20
"""What travels at once, in bytes: a piece of a large tensor, or small ones gathered. Up to three are on their way, and
with them what others said of two: copies of all these are two of DDP's buckets."""


def average_in_place(conductor: Conductor, tensors: Mapping[str, Tensor], phase: str = "weights") -> None:
    """Replace each tensor by its mean over the workers, and wait for it.

    Tensors keep their storage, strides and dtype; each dtype travels by itself; sums are taken so that equal
    replicas stay bit-equal. Large tensors are averaged where they are: a failure on the way leaves some with their
    means, some without, and those under way with neither. At most two of DDP's buckets are used in extra memory.
    """
    if conductor.workers > 1:
        run_all(conductor, in_turn({name: t.detach() for name, t in tensors.items()}), phase)


def in_turn(tensors: Mapping[str, Tensor]) -> Iterator[Exchange]:
    """Divide tensors into exchanges, by their shapes and dtypes alone, which all workers share.

    Memory decides only what an exchange does with a tensor here: one that is not contiguous, or lies on another's
    memory, is averaged in a copy and written back.
    """
    tied = overlapping(tensors)
    for name, t in tensors.items():
        if t.nbytes >= LARGE:
            for piece in cut(t, BUCKET):
                yield mean_of({name: piece}, in_place=name not in tied)
    small = {name: t for name, t in tensors.items() if 0 < t.nbytes < LARGE}
    for names in in_buckets(small, BUCKET):
        yield mean_of({name: small[name] for name in names})


def mean_of(tensors: Mapping[str, Tensor], *, in_place: bool = False) -> Exchange:
    """Average one bucket, exactly, and write the means over it; `in_place` spares a copy where memory allows."""
    flat = pack(tensors, alias=in_place)
    if flat.numel():  # no collective for nothing
        flat = yield Mean(flat, wide=True)
    write(tensors, unpack(flat, like=tensors))
    return Averaged(dict(tensors), dict, lambda: all_finite(tensors))


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


def run_all(conductor: Conductor, exchanges: Iterable[Exchange], phase: str) -> None:
    """Run exchanges together, and wait for all of them."""
    nothing = torch.empty(0)
    futures = [conductor.submit(exchange, phase, nothing) for exchange in exchanges]
    conductor.flush()
    for future in futures:
        future.wait()
