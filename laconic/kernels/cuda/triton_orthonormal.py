"""Orthonormal columns for many thin matrices at once, without waiting for the device.

Cholesky QR, twice: G = XᵀX, G = RᵀR, X ← X R⁻¹. The thin matrices are fp32 and all arithmetic between is fp64, where the
squares of 1e-20 and 1e20 are in range. One pass leaves an error of 1e-16 times the squared condition number; the second
pass removes it. If a column nearly depends on earlier ones, the first pass keeps its independent part and the second makes
that orthogonal; if only rounding noise is left, random numbers replace the column. So the result always has full rank.
For a matrix of zeros, or with NaN, the result is not written.
"""

from __future__ import annotations

import triton
import triton.language as tl

PASSES = 2
ROWS_A_TILE = 1024
NUMBERS_AT_ONCE = 2048
PIVOT_MIN = 1e-10
"""The least squared independent part of a unit column for which later columns are projected on it."""
PIVOT_NOISE = 1e-14
"""The squared independent part that fp32 rounding alone leaves of a dependent column."""


@triton.jit(do_not_specialize=["count"])
def multiply(
    tiles, count, rows_of, row_at, x, weights, status, finite, into, parts,
    FIRST: tl.constexpr, LAST: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr, ROWS: tl.constexpr,
    ROWS_A_TILE: tl.constexpr,
):  # fmt: skip
    """Compute X W for one tile of rows and its part of the next XᵀX; FIRST takes X itself, LAST has no next XᵀX.

    `status` is 1 for a column to replace by noise, and 2 for all columns of a matrix that is not usable.
    """
    tile = tl.program_id(0)
    i = tl.load(tiles + tile)
    first, m = tl.load(tiles + count + tile), tl.load(rows_of + i)
    x += tl.load(row_at + i).to(tl.int64) * RANK  # [RANK, m]
    into += tl.load(row_at + i).to(tl.int64) * RANK
    weights += i * PADDED_RANK * PADDED_RANK
    k = tl.arange(0, PADDED_RANK)
    gram = tl.zeros((PADDED_RANK, PADDED_RANK), dtype=tl.float64)
    if not FIRST:
        lost = tl.load(status + i * PADDED_RANK + k)
        w = tl.load(weights + k[None, :] * PADDED_RANK + k[:, None])  # Wᵀ
    for row in range(first, tl.minimum(first + ROWS_A_TILE, m), ROWS):
        y = row + tl.arange(0, ROWS)
        inside = (k < RANK)[:, None] & (y < m)[None, :]
        at = k[:, None] * m + y[None, :]
        if FIRST:
            block = tl.load(x + at, mask=inside, other=0.0).to(tl.float64)
        else:
            thin = tl.load(x + at, mask=inside, other=0.0).to(tl.float64)
            block = tl.dot(w, thin, out_dtype=tl.float64)
            noise = tl.rand(17, y[None, :] * PADDED_RANK + k[:, None]).to(tl.float64) - 0.5
            block = tl.where(inside, tl.where((lost == 1)[:, None], noise, block), 0.0)
            if LAST:
                if tl.load(finite) * (2 - tl.max(lost, axis=0)) > 0:
                    tl.store(into + at, block.to(tl.float32), mask=inside)
            else:
                block = block.to(tl.float32)
                tl.store(into + at, block, mask=inside)
                block = block.to(tl.float64)
        if not LAST:
            gram = tl.dot(block, tl.trans(block), gram, out_dtype=tl.float64)
    if not LAST:
        tl.store(parts + tile * PADDED_RANK * PADDED_RANK + k[:, None] * PADDED_RANK + k[None, :], gram)


@triton.jit
def inverse(
    first_tile, parts, weights, status,
    FIRST: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr, TILES: tl.constexpr, PIVOT_MIN: tl.constexpr,
    PIVOT_NOISE: tl.constexpr,
):  # fmt: skip
    """Compute W = R⁻¹ for one matrix, so that X W has orthonormal columns, and mark the columns to replace (1).

    A matrix of zeros, or with NaN or Inf, is marked with 2 instead.
    """
    i = tl.program_id(0)
    a = tl.arange(0, PADDED_RANK)[:, None]
    b = tl.arange(0, PADDED_RANK)[None, :]
    begin, end = tl.load(first_tile + i), tl.load(first_tile + i + 1)
    g = tl.zeros((PADDED_RANK, PADDED_RANK), dtype=tl.float64)
    for tile in range(begin, end, TILES):
        t = tile + tl.arange(0, TILES)[:, None, None]
        place = t * (PADDED_RANK * PADDED_RANK) + (a * PADDED_RANK + b)[None, :, :]
        g += tl.sum(tl.load(parts + place, mask=t < end, other=0.0), axis=0)
    # Scale to a unit diagonal: then a pivot is the squared independent part of a column.
    length = tl.sum(tl.where(a == b, g, 0.0), axis=0)
    total = tl.sum(length, axis=0)
    usable = (total > 0) & (total < float("inf"))
    unit = tl.where(length > 0, 1.0 / tl.sqrt(tl.where(length > 0, length, 1.0)), 0.0)
    g = g * tl.sum(tl.where(a == b, unit[None, :], 0.0), axis=1)[:, None] * unit[None, :]
    w = tl.where(a == b, unit[None, :], 0.0)
    k = tl.arange(0, PADDED_RANK)
    empty = tl.zeros((PADDED_RANK,), dtype=tl.int32)
    for j in range(RANK):
        pivot = tl.sum(tl.sum(tl.where((a == j) & (b == j), g, 0.0), axis=1), axis=0)
        keep = pivot > PIVOT_MIN
        empty = tl.where(k == j, tl.where(pivot <= PIVOT_NOISE, 1, 0), empty)
        root = tl.where(keep, 1.0 / tl.sqrt(tl.where(keep, pivot, 1.0)), 0.0)
        r = tl.sum(tl.where(a == j, g, 0.0), axis=0) * root  # row j of R, over columns
        r_down = tl.sum(tl.where(b == j, g, 0.0), axis=1) * root  # the same, over rows
        g -= r_down[:, None] * r[None, :]
        # The rest of a nearly dependent column is too inexact to project with. It is kept as it is, and the next pass
        # scales it up and makes it orthogonal.
        new = tl.sum(tl.where(b == j, w, 0.0), axis=1) * tl.where(keep, root, 1.0 if FIRST else 0.0)
        later = tl.where(k > j, r, 0.0)
        w = tl.where(b == j, new[:, None], w - (new * tl.where(keep, 1.0, 0.0))[:, None] * later[None, :])
    tl.store(weights + i * PADDED_RANK * PADDED_RANK + a * PADDED_RANK + b, w)
    if FIRST:
        tl.store(status + i * PADDED_RANK + k, tl.where(usable, empty, 2))
    else:
        before = tl.load(status + i * PADDED_RANK + k)
        tl.store(status + i * PADDED_RANK + k, tl.where(before > 1, 2, 0))
