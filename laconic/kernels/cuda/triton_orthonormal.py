"""Orthonormal columns for many thin matrices at once, without waiting for the device.

Cholesky QR, twice over: G = XᵀX, G = RᵀR, X ← X R⁻¹. The thin matrices are fp32 and everything between is fp64, where
neither squares of 1e-20 nor of 1e20 matter and one pass leaves an error of 1e-16 times the condition number squared; the
second pass takes that away. Of a column that nearly depends on those before it the first pass keeps only what is new, and
the second makes that orthogonal; where nothing is new but rounding, random numbers take its place. So rank is never lost.
A matrix of zeros or with NaN leaves its result as it was.
"""

from __future__ import annotations

import triton
import triton.language as tl

PASSES = 2
ROWS_A_TILE = 1024
NUMBERS_AT_ONCE = 2048
LEAST = 1e-10
"""How much of a column, squared, must be new for others to be projected on it."""
ROUNDING = 1e-14
"""What fp32's rounding alone leaves of a column that is not new."""


@triton.jit(do_not_specialize=["count"])
def multiply(
    tiles, count, rows_of, row_at, x, weights, gone, good, into, parts,
    FIRST: tl.constexpr, LAST: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    ROWS_A_TILE: tl.constexpr,
):  # fmt: skip
    """X W for one tile of rows, and its part of the next XᵀX; the first pass takes X as it is, the last has no next.

    `gone` is 1 for each column that is to be replaced by noise, and 2 for all columns of a matrix that is not usable.
    """
    tile = tl.program_id(0)
    i = tl.load(tiles + tile)
    first, m = tl.load(tiles + count + tile), tl.load(rows_of + i)
    x += tl.load(row_at + i).to(tl.int64) * RANK  # [RANK, m]
    into += tl.load(row_at + i).to(tl.int64) * RANK
    weights += i * WIDE * WIDE
    k = tl.arange(0, WIDE)
    gram = tl.zeros((WIDE, WIDE), dtype=tl.float64)
    if not FIRST:
        lost = tl.load(gone + i * WIDE + k)
        w = tl.load(weights + k[None, :] * WIDE + k[:, None])  # Wᵀ
    for row in range(first, tl.minimum(first + ROWS_A_TILE, m), ROWS):
        y = row + tl.arange(0, ROWS)
        inside = (k < RANK)[:, None] & (y < m)[None, :]
        at = k[:, None] * m + y[None, :]
        if FIRST:
            block = tl.load(x + at, mask=inside, other=0.0).to(tl.float64)
        else:
            thin = tl.load(x + at, mask=inside, other=0.0).to(tl.float64)
            block = tl.dot(w, thin, out_dtype=tl.float64)
            noise = tl.rand(17, y[None, :] * WIDE + k[:, None]).to(tl.float64) - 0.5
            block = tl.where(inside, tl.where((lost == 1)[:, None], noise, block), 0.0)
            if LAST:
                if tl.load(good) * (2 - tl.max(lost, axis=0)) > 0:
                    tl.store(into + at, block.to(tl.float32), mask=inside)
            else:
                block = block.to(tl.float32)
                tl.store(into + at, block, mask=inside)
                block = block.to(tl.float64)
        if not LAST:
            gram = tl.dot(block, tl.trans(block), gram, out_dtype=tl.float64)
    if not LAST:
        tl.store(parts + tile * WIDE * WIDE + k[:, None] * WIDE + k[None, :], gram)


@triton.jit
def inverse(
    first_tile, parts, weights, gone,
    FIRST: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr, LEAST: tl.constexpr,
    ROUNDING: tl.constexpr,
):  # fmt: skip
    """W = R⁻¹ for one matrix, so that X W has orthonormal columns; and which columns are to be replaced (1).

    A matrix of zeros, or with NaN or Inf, is marked by 2 instead.
    """
    i = tl.program_id(0)
    a = tl.arange(0, WIDE)[:, None]
    b = tl.arange(0, WIDE)[None, :]
    begin, end = tl.load(first_tile + i), tl.load(first_tile + i + 1)
    g = tl.zeros((WIDE, WIDE), dtype=tl.float64)
    for tile in range(begin, end, TILES):
        t = tile + tl.arange(0, TILES)[:, None, None]
        place = t * (WIDE * WIDE) + (a * WIDE + b)[None, :, :]
        g += tl.sum(tl.load(parts + place, mask=t < end, other=0.0), axis=0)
    # Unit diagonal, so that a pivot tells how much of a column is new.
    length = tl.sum(tl.where(a == b, g, 0.0), axis=0)
    total = tl.sum(length, axis=0)
    usable = (total > 0) & (total < float("inf"))
    unit = tl.where(length > 0, 1.0 / tl.sqrt(tl.where(length > 0, length, 1.0)), 0.0)
    g = g * tl.sum(tl.where(a == b, unit[None, :], 0.0), axis=1)[:, None] * unit[None, :]
    w = tl.where(a == b, unit[None, :], 0.0)
    k = tl.arange(0, WIDE)
    empty = tl.zeros((WIDE,), dtype=tl.int32)
    for j in range(RANK):
        pivot = tl.sum(tl.sum(tl.where((a == j) & (b == j), g, 0.0), axis=1), axis=0)
        keep = pivot > LEAST
        empty = tl.where(k == j, tl.where(pivot <= ROUNDING, 1, 0), empty)
        root = tl.where(keep, 1.0 / tl.sqrt(tl.where(keep, pivot, 1.0)), 0.0)
        r = tl.sum(tl.where(a == j, g, 0.0), axis=0) * root  # row j of R, over columns
        r_down = tl.sum(tl.where(b == j, g, 0.0), axis=1) * root  # the same, over rows
        g -= r_down[:, None] * r[None, :]
        # What is left of a column that nearly depends on others is too inexact to project with, but not lost: it stays
        # as it is, and the next pass scales it up and makes it orthogonal.
        new = tl.sum(tl.where(b == j, w, 0.0), axis=1) * tl.where(keep, root, 1.0 if FIRST else 0.0)
        later = tl.where(k > j, r, 0.0)
        w = tl.where(b == j, new[:, None], w - (new * tl.where(keep, 1.0, 0.0))[:, None] * later[None, :])
    tl.store(weights + i * WIDE * WIDE + a * WIDE + b, w)
    if FIRST:
        tl.store(gone + i * WIDE + k, tl.where(usable, empty, 2))
    else:
        before = tl.load(gone + i * WIDE + k)
        tl.store(gone + i * WIDE + k, tl.where(before > 1, 2, 0))
