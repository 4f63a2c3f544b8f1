"""Average tensors in place: the one routine behind weight synchronisation and the model averagers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from laconic.comm.collectives import sums_exactly
from laconic.comm.queue import CollectiveQueue
from laconic.exchange import Averaged, Exchange, Mean, all_finite
from laconic.packing import cut, in_buckets, overlapping, pack, same_memory, side_by_side, unpack
from laconic.torch_private.foreach import copy_all

LARGE_BYTES = 1 << 20
"""Tensors of this size are averaged in their own memory. Smaller ones are packed: a copy costs less than latency."""

EXACT_PIECE_BYTES, WIDE_PIECE_BYTES = 16 << 20, 6 << 20
"""What one collective averages: a piece of a large tensor, or small ones packed. Up to three are in flight. A plain sum
needs one copy of a packed piece, a wide mean two of any piece: together no more than two of DDP's buckets."""


def average_in_place(
    queue: CollectiveQueue,
    tensors: Mapping[str, Tensor],
    phase: str = "weights",
    large_bytes: int = LARGE_BYTES,
    piece_bytes: int | None = None,
    shares: tuple[float, ...] | None = None,
) -> None:
    """Replace each tensor by its mean over the workers, weighted by their `shares` if given, and wait for it.

    Tensors keep their storage, strides and dtype. Each dtype is averaged by itself. Equal replicas stay bit-equal.
    Large tensors are averaged in their own memory: after a failure, some hold their means, some their old values, and
    those in flight neither. Extra memory is at most two of DDP's buckets.
    """
    if queue.workers > 1:
        detached = {name: t.detach() for name, t in tensors.items()}
        queue.run_all(in_pieces(detached, queue.workers, large_bytes, piece_bytes, shares), phase)


def in_pieces(
    tensors: Mapping[str, Tensor],
    workers: int,
    large_bytes: int = LARGE_BYTES,
    piece_bytes: int | None = None,
    shares: tuple[float, ...] | None = None,
) -> Iterator[Exchange[Averaged]]:
    """Divide tensors into exchanges of one collective each, by their shapes and dtypes alone, which all workers share.

    Memory layout decides only how this worker handles a piece: one that is not contiguous, or shares memory with
    another tensor, is averaged in a copy and written back.
    """
    tied = overlapping(tensors)
    for piece, is_large in pieces(tensors, workers, large_bytes, piece_bytes, plain=shares is None):
        yield _averaged(piece, is_large and tied.isdisjoint(piece), shares)


def pieces(
    tensors: Mapping[str, Tensor],
    workers: int,
    large_bytes: int = LARGE_BYTES,
    piece_bytes: int | None = None,
    plain: bool = True,
) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Divide tensors into what one collective averages, and say whether that is a part of a large tensor.

    `plain` means are sums where these are exact; weighted ones never are.
    """
    for dtype in dict.fromkeys(t.dtype for t in tensors.values()):
        as_sum = plain and sums_exactly(dtype, workers)
        cap_bytes = piece_bytes or (EXACT_PIECE_BYTES if as_sum else WIDE_PIECE_BYTES)
        of_dtype = {name: t for name, t in tensors.items() if t.dtype == dtype}
        for name, t in of_dtype.items():
            if t.nbytes >= large_bytes:
                for piece in cut(t, cap_bytes):
                    yield {name: piece}, True
        small = {name: t for name, t in of_dtype.items() if 0 < t.nbytes < large_bytes}
        for names in in_buckets(small, cap_bytes):
            yield {name: small[name] for name in names}, False


def _averaged(tensors: dict[str, Tensor], in_place: bool, shares: tuple[float, ...] | None) -> Exchange[Averaged]:
    """Average tensors of one dtype in one collective, and write the means over them."""
    flat = side_by_side(tensors.values()) if in_place else None
    mean = yield Mean(pack(tensors) if flat is None else flat, wide=True, shares=shares)
    if flat is None or mean.data_ptr() != flat.data_ptr():
        write(tensors, unpack(mean, like=tensors))
    return Averaged(tensors, dict, lambda: all_finite(tensors))


def write(into: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values over tensors of the same names, unless they are there already."""
    moved = [name for name, t in into.items() if t is not values[name] and not same_memory(t, values[name])]
    if moved:
        with torch.no_grad():
            copy_all([into[name] for name in moved], [values[name] for name in moved])


def written(exchange: Exchange[Averaged], into: Mapping[str, Tensor]) -> Exchange[Averaged]:
    """Run an exchange, and write its means over `into`."""
    end = yield from exchange
    if end.mean is not into:
        write(into, end.mean)
    return end if end.decided else replace(end, finite=lambda: all_finite(into))  # which holds no other memory
