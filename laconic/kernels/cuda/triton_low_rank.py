"""PowerSGD with error feedback as grouped Triton kernels: one launch over all matrices of a bucket for each phase.

    compute_p       M = G + E;  P = M Q            one pass over G and E; STORE_M writes M over G
    compute_q       Q = Mᵀ P                       one pass, in chunks of rows; `sum_parts` adds the chunks up
    reconstruct     G = U Vᵀ;  E = M − U' V'ᵀ      one pass: the mean over all workers, and this worker's new residual

All matrices have one rank. Their factors, [rank, rows] each, are concatenated in one flat tensor, which is also the
message. A table of tiles gives each program its matrix and position. Arithmetic is fp32 (tf32x3 on the tensor cores, which
keeps fp32 precision), whatever the dtype of the gradients. Residuals are fp32. Nothing here waits for the device.

All three kernels are memory-bound and need accesses of 16 bytes to reach full bandwidth. ALIGNED means that every row of
these matrices starts at a multiple of 16 bytes: the compiler cannot infer that from addresses and widths in a table.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Blocks:
    """The block that one program processes at a time, and its numbers of warps and stages."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 3
    dot: bool = True
    """Whether `reconstruct` multiplies on the tensor cores; at low rank plain multiply-adds are faster."""
    one_tile: bool = False
    """Whether a program of `reconstruct` processes one tile, not a whole block of rows."""


# Keyed by the largest rank that they serve; separate tables for M computed as G + E, and for M stored over G.
# Measured on an H200 with the matrices of BERT-large, rank 32 with those of GPT-2 medium (benchmarks/tiles.py).
COMPUTE_P = {64: Blocks(64, 64, warps=4, stages=3)}
COMPUTE_P_AND_M = {16: Blocks(32, 32, warps=2, stages=5), 64: Blocks(64, 64, warps=4, stages=3)}
COMPUTE_Q = {
    16: Blocks(32, 64, warps=2, stages=4),
    32: Blocks(32, 128, warps=4, stages=3),
    64: Blocks(32, 32, warps=2, stages=4),
}
RECONSTRUCT = {
    1: Blocks(16, 512, warps=8, stages=2, dot=False),
    8: Blocks(4, 512, warps=4, stages=1, dot=False, one_tile=True),
    16: Blocks(32, 64, warps=2, stages=2),
    64: Blocks(64, 32, warps=4, stages=2),
}
RECONSTRUCT_FROM_M = {
    1: Blocks(16, 512, warps=8, stages=1, dot=False, one_tile=True),
    8: Blocks(8, 512, warps=4, stages=1, dot=False, one_tile=True),
    16: Blocks(16, 64, warps=2, stages=2),
    32: Blocks(32, 128, warps=4, stages=2),
    64: Blocks(32, 64, warps=4, stages=2),
}
CHUNK_ROWS = 1024
"""Rows that one program of `compute_q` sums over."""


def blocks(choices: dict[int, Blocks], rank: int) -> Blocks:
    """Return the blocks for a rank."""
    return choices[min(largest for largest in choices if largest >= rank)]


@triton.jit
def _matrix(tiles, count, matrices, g_at, e_at, GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, RANK: tl.constexpr):
    """Return a tile's first row and column, and its matrix: shape, gradient, residual, offsets of factors and parts."""
    tile = tl.program_id(0)
    i = tl.load(tiles + tile)
    row, column = tl.load(tiles + count + tile), tl.load(tiles + 2 * count + tile)
    matrices += 5 * i
    m, n = tl.load(matrices), tl.load(matrices + 1)
    g = tl.load(g_at + i).to(tl.pointer_type(GRADIENT))
    e = tl.load(e_at + i).to(tl.pointer_type(tl.float32))
    p_at, q_at, part_at = tl.load(matrices + 2), tl.load(matrices + 3), tl.load(matrices + 4)
    column = tl.multiple_of(column, 16)
    if ALIGNED:
        n = tl.multiple_of(n, 16 // (GRADIENT.primitive_bitwidth // 8))
        g = tl.multiple_of(g, 16)
        e = tl.multiple_of(e, 16)
        q_at = tl.multiple_of(q_at, 4)
        part_at = tl.multiple_of(part_at, 4)
    return row, column, m, n, g, e, p_at.to(tl.int64) * RANK, q_at.to(tl.int64) * RANK, part_at.to(tl.int64) * RANK


@triton.jit(do_not_specialize=["count"])
def compute_p(
    tiles, count, matrices, g_at, e_at, q, p, own, finite, keep,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STORE_M: tl.constexpr,
):  # fmt: skip
    """Compute P = (G + E) Q for one block of rows, for the message and for `own`. With STORE_M, write G + E over G."""
    tl.store(finite, 1)  # by every program, before any kernel reads it
    tl.store(keep, 1)
    row, _, m, n, g, e, p_at, q_at, _ = _matrix(tiles, count, matrices, g_at, e_at, GRADIENT, ALIGNED, RANK)
    q += q_at
    y = row + tl.arange(0, ROWS)
    k = tl.arange(0, PADDED_RANK)
    lines = y.to(tl.int64)[:, None] * n
    acc = tl.zeros((ROWS, PADDED_RANK), dtype=tl.float32)
    for column in range(0, n, COLUMNS):
        x = column + tl.arange(0, COLUMNS)
        inside = (y < m)[:, None] & (x < n)[None, :]
        g_tile, e_tile = g + lines + x[None, :], e + lines + x[None, :]
        block = tl.load(g_tile, mask=inside, other=0.0).to(tl.float32) + tl.load(e_tile, mask=inside, other=0.0)
        if STORE_M:
            tl.store(g_tile, block, mask=inside)
        factor = tl.load(q + k[None, :] * n + x[:, None], mask=(x < n)[:, None] & (k < RANK)[None, :], other=0.0)
        acc = tl.dot(block, factor, acc, input_precision="tf32x3")
    at = p_at + k[None, :] * m + y[:, None]
    tl.store(p + at, acc, mask=(y < m)[:, None] & (k < RANK)[None, :])
    tl.store(own + at, acc, mask=(y < m)[:, None] & (k < RANK)[None, :])


@triton.jit(do_not_specialize=["count"])
def compute_q(
    tiles, count, matrices, g_at, e_at, p, parts, finite, keep,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, ADD: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Compute Mᵀ P for one block of columns and one chunk of rows. M is G + E with ADD; otherwise it is stored in G."""
    if FIRST:
        tl.store(finite, 1)  # by every program, before any kernel reads it
        tl.store(keep, 1)
    first, column, m, n, g, e, p_at, _, part_at = _matrix(tiles, count, matrices, g_at, e_at, GRADIENT, ALIGNED, RANK)
    p += p_at
    x = column + tl.arange(0, COLUMNS)
    k = tl.arange(0, PADDED_RANK)
    acc = tl.zeros((PADDED_RANK, COLUMNS), dtype=tl.float32)  # Qᵀ = Pᵀ M reads M row by row
    last = tl.minimum(first + CHUNK, m)
    for row in range(first, last, ROWS):
        y = row + tl.arange(0, ROWS)
        inside = (y < last)[:, None] & (x < n)[None, :]
        lines = y.to(tl.int64)[:, None] * n
        block = tl.load(g + lines + x[None, :], mask=inside, other=0.0).to(tl.float32)
        if ADD:
            block += tl.load(e + lines + x[None, :], mask=inside, other=0.0)
        factor = tl.load(p + k[:, None] * m + y[None, :], mask=(k < RANK)[:, None] & (y < last)[None, :], other=0.0)
        acc = tl.dot(factor, block, acc, input_precision="tf32x3")
    parts += part_at + (first // CHUNK).to(tl.int64) * n * RANK  # [chunk, rank, columns]
    tl.store(parts + k[:, None] * n + x[None, :], acc, mask=(k < RANK)[:, None] & (x < n)[None, :])


@triton.jit(do_not_specialize=["count"])
def sum_parts(tiles, count, matrices, parts, q, own, RANK: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Sum the parts of all chunks, in order, for one block of Q; write it to the message and to `own`."""
    tile = tl.program_id(0)
    matrices += 5 * tl.load(tiles + tile)
    m, n = tl.load(matrices), tl.load(matrices + 1)
    at = tl.load(tiles + count + tile) + tl.arange(0, SIZE)
    inside = at < n * RANK
    parts += tl.load(matrices + 4).to(tl.int64) * RANK
    acc = tl.zeros((SIZE,), dtype=tl.float32)
    for chunk in range(0, tl.cdiv(m, CHUNK)):
        acc += tl.load(parts + chunk * n * RANK + at, mask=inside, other=0.0)
    to = tl.load(matrices + 3).to(tl.int64) * RANK + at
    tl.store(q + to, acc, mask=inside)
    tl.store(own + to, acc, mask=inside)


@triton.jit(do_not_specialize=["count"])
def clear_if_nonfinite(x, count, finite, keep, SIZE: tl.constexpr):
    """Clear the flags `finite` and `keep` if one block of the message holds NaN or Inf."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + at, mask=at < count, other=0.0)
    if tl.max(tl.where(tl.abs(value) < float("inf"), 0, 1), axis=0) > 0:
        tl.store(finite, 0)
        tl.store(keep, 0)


@triton.jit(do_not_specialize=["count"])
def keep_one(new, old, count, keep, SIZE: tl.constexpr):
    """Copy one block of `new` over `old` if the flag `keep` is set, else of `old` over `new`."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    if tl.load(keep) > 0:
        tl.store(old + at, tl.load(new + at, mask=at < count), mask=at < count)
    else:
        tl.store(new + at, tl.load(old + at, mask=at < count), mask=at < count)


@triton.jit(do_not_specialize=["count"])
def reconstruct(
    tiles, count, matrices, g_at, e_at, u, v, own, finite, keep,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, ADD: tl.constexpr, LEFT: tl.constexpr, DOT: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """Compute G = U Vᵀ and E = M − U' V'ᵀ for one block of rows, or with ONE_TILE for one tile of it.

    M is G + E with ADD; otherwise it is stored in G. One factor is the same in both products; `own` is U' if LEFT,
    else V'. Unless `keep`, E is not changed; unless `finite`, G becomes NaN: the exchange is void as a whole. What G
    loses because its dtype is narrower goes into E.
    """
    row, column, m, n, g, e, p_at, q_at, _ = _matrix(tiles, count, matrices, g_at, e_at, GRADIENT, ALIGNED, RANK)
    zero_or_nan = tl.where(tl.load(finite) > 0, 0.0, float("nan"))
    commit = tl.load(keep) > 0
    u += p_at
    v += q_at
    own += p_at if LEFT else q_at
    y = row + tl.arange(0, ROWS)
    if ONE_TILE:
        x = column + tl.arange(0, COLUMNS)
        _reconstruct_tile(y, x, m, n, g, e, u, v, own, zero_or_nan, commit, GRADIENT, RANK, PADDED_RANK, ADD, LEFT, DOT)
    else:
        for first in range(0, n, COLUMNS):
            x = first + tl.arange(0, COLUMNS)
            _reconstruct_tile(
                y, x, m, n, g, e, u, v, own, zero_or_nan, commit, GRADIENT, RANK, PADDED_RANK, ADD, LEFT, DOT
            )


@triton.jit
def _reconstruct_tile(
    y, x, m, n, g, e, u, v, own, zero_or_nan, commit,
    GRADIENT: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr, ADD: tl.constexpr, LEFT: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    lines = y.to(tl.int64)[:, None] * n
    inside = (y < m)[:, None] & (x < n)[None, :]
    g_tile, e_tile = g + lines + x[None, :], e + lines + x[None, :]
    residual = tl.load(g_tile, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual += tl.load(e_tile, mask=inside, other=0.0)
    if DOT:
        k = tl.arange(0, PADDED_RANK)
        left, right = (y < m)[:, None] & (k < RANK)[None, :], (x < n)[None, :] & (k < RANK)[:, None]
        y_at, x_at = k[None, :] * m + y[:, None], k[:, None] * n + x[None, :]
        a, b = tl.load(u + y_at, mask=left, other=0.0), tl.load(v + x_at, mask=right, other=0.0)
        out = tl.dot(a, b, input_precision="tf32x3")
        if LEFT:
            a = tl.load(own + y_at, mask=left, other=0.0)
        else:
            b = tl.load(own + x_at, mask=right, other=0.0)
        residual -= tl.dot(a, b, input_precision="tf32x3")
    else:
        # If a row is as wide as all threads together, each thread keeps the factors of its columns in registers.
        # Zeros from a fully masked load have the register layout of the other loads, so no conversion is needed.
        out = tl.load(e_tile, mask=(y < 0)[:, None] & (x < n)[None, :], other=0.0)
        for k in range(RANK):
            a = tl.load(u + k * m + y, mask=y < m, other=0.0)
            b = tl.load(v + k * n + x, mask=x < n, other=0.0)
            out += a[:, None] * b[None, :]
            if LEFT:
                a = tl.load(own + k * m + y, mask=y < m, other=0.0)
            else:
                b = tl.load(own + k * n + x, mask=x < n, other=0.0)
            residual -= a[:, None] * b[None, :]
    if GRADIENT.primitive_bitwidth == 32:
        tl.store(g_tile, out + zero_or_nan, mask=inside)
    else:
        rounded = out
        if GRADIENT == tl.float16:  # noqa: SIM300
            rounded = tl.minimum(tl.maximum(out, -65504.0), 65504.0)
        rounded = (rounded + zero_or_nan).to(GRADIENT)
        tl.store(g_tile, rounded, mask=inside)
        residual += out - rounded.to(tl.float32)
    if commit:
        tl.store(e_tile, residual, mask=inside)
