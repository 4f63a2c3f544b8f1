"""Orthonormal columns for many thin matrices at once, without waiting for the device.

Cholesky QR, three times over: G = XᵀX, G = RᵀR, X ← X R⁻¹. Once is fast but inexact for ill-conditioned columns;
repeated, it is as orthogonal as Householder's. Columns are scaled to unit length first, so neither 1e-20 nor 1e20
matters. Of a column that nearly depends on those before it the first pass keeps only what is new, and the next one makes
that orthogonal; a column of zeros is replaced by random numbers. So rank is never lost. A matrix of zeros or with NaN leaves its result as it was.
"""

from __future__ import annotations

import triton
import triton.language as tl

PASSES = 3
ROWS_A_TILE = 256


@triton.jit
def largest(
    tiles, stride, rows_of, row_at, all_rows, x, parts, RANK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr
):
    """The largest absolute entry of each column in one tile of rows; NaN if there is one."""
    tile = tl.program_id(0)
    i = tl.load(tiles + tile)
    y = tl.load(tiles + stride + tile) + tl.arange(0, ROWS)
    k = tl.arange(0, WIDE)
    inside = (y < tl.load(rows_of + i))[:, None] & (k < RANK)[None, :]
    block = tl.load(x + k[None, :] * all_rows + (tl.load(row_at + i) + y)[:, None], mask=inside, other=0.0)
    top = tl.max(tl.abs(block), axis=0)
    broken = tl.sum(tl.where(block == block, 0.0, 1.0), axis=0)
    tl.store(parts + tile * WIDE + k, tl.where(broken > 0, float("nan"), top))


@triton.jit
def scales(first_tile, parts, weights, dropped, usable, RANK: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr):
    """The first W, which brings each column to size 1, and whether the matrix is neither zero nor broken."""
    i = tl.program_id(0)
    begin, end = tl.load(first_tile + i), tl.load(first_tile + i + 1)
    k = tl.arange(0, WIDE)
    top = tl.zeros((WIDE,), dtype=tl.float32)
    broken = tl.zeros((WIDE,), dtype=tl.float32)
    for tile in range(begin, end, TILES):
        t = tile + tl.arange(0, TILES)
        block = tl.load(parts + t[:, None] * WIDE + k[None, :], mask=(t < end)[:, None], other=0.0)
        broken += tl.sum(tl.where(block == block, 0.0, 1.0), axis=0)
        top = tl.maximum(top, tl.max(tl.where(block == block, block, 0.0), axis=0))
    broken += tl.where(top == float("inf"), 1.0, 0.0)
    a = tl.arange(0, WIDE)[:, None]
    factor = tl.where(top > 0, 1.0 / tl.where(top > 0, top, 1.0), 0.0)
    tl.store(weights + i * WIDE * WIDE + a * WIDE + k[None, :], tl.where(a == k[None, :], factor[None, :], 0.0))
    tl.store(dropped + i * WIDE + k, tl.zeros((WIDE,), dtype=tl.int32))
    good = (tl.sum(broken, axis=0) == 0) & (tl.max(top, axis=0) > 0)
    tl.store(usable + i, good.to(tl.int32))


@triton.jit
def inverse(
    first_tile,
    parts,
    weights,
    dropped,
    RANK: tl.constexpr,
    WIDE: tl.constexpr,
    LEAST: tl.constexpr,
    LAST: tl.constexpr,
):
    """W = R⁻¹ for one matrix, so that X W has orthonormal columns; and which columns are zero."""
    i = tl.program_id(0)
    a = tl.arange(0, WIDE)[:, None]
    b = tl.arange(0, WIDE)[None, :]
    g = tl.zeros((WIDE, WIDE), dtype=tl.float32)
    for tile in range(tl.load(first_tile + i), tl.load(first_tile + i + 1)):
        g += tl.load(parts + tile * WIDE * WIDE + a * WIDE + b)
    # Unit diagonal, so that a pivot tells how much of a column is new.
    length = tl.sum(tl.where(a == b, g, 0.0), axis=0)
    unit = tl.where(length > 0, 1.0 / tl.sqrt(tl.where(length > 0, length, 1.0)), 0.0)
    unit_across = tl.sum(tl.where(a == b, unit[None, :], 0.0), axis=1)
    g = g * unit_across[:, None] * unit[None, :]
    w = tl.where(a == b, unit[None, :], 0.0)
    for j in range(RANK):
        pivot = tl.sum(tl.sum(tl.where((a == j) & (b == j), g, 0.0), axis=1), axis=0)
        keep = pivot > LEAST
        root = tl.where(keep, 1.0 / tl.sqrt(tl.where(keep, pivot, 1.0)), 0.0)
        r = tl.sum(tl.where(a == j, g, 0.0), axis=0) * root  # row j of R, over columns
        r_down = tl.sum(tl.where(b == j, g, 0.0), axis=1) * root  # the same, over rows
        g -= r_down[:, None] * r[None, :]
        # What is left of a column that nearly depends on others is too inexact to project with, but not lost: it stays
        # as it is, and the next pass scales it up and makes it orthogonal.
        left = tl.where(keep, root, 0.0 if LAST else 1.0)
        new = tl.sum(tl.where(b == j, w, 0.0), axis=1) * left
        later = tl.where(tl.arange(0, WIDE) > j, r, 0.0)
        w = tl.where(b == j, new[:, None], w - (new * tl.where(keep, 1.0, 0.0))[:, None] * later[None, :])
    gone = (length <= 0).to(tl.int32)
    tl.store(weights + i * WIDE * WIDE + a * WIDE + b, w)
    tl.store(dropped + i * WIDE + tl.arange(0, WIDE), gone)


@triton.jit
def apply(
    tiles, stride, rows_of, row_at, all_rows, x, weights, dropped, usable, good, into, parts,
    LAST: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """X W for one tile of rows, and its part of the next XᵀX; the last pass writes only what is usable."""
    tile = tl.program_id(0)
    i = tl.load(tiles + tile)
    y = tl.load(tiles + stride + tile) + tl.arange(0, ROWS)
    k = tl.arange(0, WIDE)
    inside = (y < tl.load(rows_of + i))[:, None] & (k < RANK)[None, :]
    at = k[None, :] * all_rows + (tl.load(row_at + i) + y)[:, None]
    w = tl.load(weights + i * WIDE * WIDE + k[:, None] * WIDE + k[None, :])
    block = tl.dot(tl.load(x + at, mask=inside, other=0.0), w, input_precision="tf32x3")
    if LAST:
        if tl.load(usable + i) * tl.load(good) > 0:
            tl.store(into + at, block, mask=inside)
    else:
        gone = tl.load(dropped + i * WIDE + k)
        noise = tl.rand(17, (y[:, None] * WIDE + k[None, :])) - 0.5
        block = tl.where(inside & (gone != 0)[None, :], noise, tl.where(inside, block, 0.0))
        tl.store(into + at, block, mask=inside)
        product = tl.dot(tl.trans(block), block, input_precision="tf32x3")
        tl.store(parts + tile * WIDE * WIDE + k[:, None] * WIDE + k[None, :], product)
