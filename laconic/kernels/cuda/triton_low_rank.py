"""PowerSGD with error feedback as grouped Triton kernels: one launch over all matrices of a bucket for each phase.

    project     M = G + E;  P = M Q            one pass over G and E; M is left in the place of G where that is wanted
    reflect     Q = Mᵀ P                       one pass, in row chunks whose parts are then added up
    deliver     G = U Vᵀ;  E = M − U' V'ᵀ      one pass: what all said, and what this worker still owes

All matrices share one rank. Their factors, [rank, rows] each, lie side by side in one flat tensor, which is also the
message. A table of tiles tells each program its matrix and place. Arithmetic is fp32 (tf32x3 on the tensor cores, which
keeps fp32's precision), whatever the gradients' dtype. Residuals are fp32. Nothing here waits for the device.

Memory is what limits all three, and 16 bytes an access are what it takes to use it: ALIGNED says that every row of these
matrices begins at a multiple of 16 bytes, which addresses and widths read from a table do not tell the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Blocks:
    """What one program works on at a time, and with how many warps and stages."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 3
    dot: bool = True
    """Whether `deliver` multiplies on the tensor cores; with few ranks it need not."""
    alone: bool = False
    """Whether a program of `deliver` has one tile only, not all of its rows."""


# By the largest rank that they serve; apart for M = G + E that is read as such, and M that lies in the place of G.
# Chosen by trial on an H200 with the matrices of BERT-large.
PROJECT = {64: Blocks(64, 64, warps=4, stages=3)}
PROJECT_AND_KEEP = {16: Blocks(32, 32, warps=2, stages=5), 64: Blocks(64, 64, warps=4, stages=3)}
REFLECT = {16: Blocks(32, 64, warps=2, stages=4), 64: Blocks(32, 32, warps=2, stages=4)}
DELIVER = {
    1: Blocks(16, 512, warps=8, stages=2, dot=False),
    8: Blocks(4, 512, warps=4, stages=1, dot=False, alone=True),
    16: Blocks(32, 64, warps=2, stages=2),
    64: Blocks(64, 32, warps=4, stages=2),
}
DELIVER_KEPT = {
    1: Blocks(16, 512, warps=8, stages=1, dot=False, alone=True),
    8: Blocks(8, 512, warps=4, stages=1, dot=False, alone=True),
    16: Blocks(16, 64, warps=2, stages=2),
    64: Blocks(32, 64, warps=4, stages=2),
}
CHUNK_ROWS = 1024
"""Rows that one program of `reflect` adds up."""


def blocks(choices: dict[int, Blocks], rank: int) -> Blocks:
    """The blocks for a rank."""
    return choices[min(largest for largest in choices if largest >= rank)]


@triton.jit
def _matrix(tiles, count, matrices, g_at, e_at, GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, RANK: tl.constexpr):
    """The matrix of a tile: first row and column, rows and columns, gradient and residual, where factors and parts begin."""
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
def project(
    tiles, count, matrices, g_at, e_at, q, p, own, good,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """P = (G + E) Q for one block of rows, written twice: as the message, and to keep. With KEEP, G becomes G + E."""
    tl.store(good, 1)  # by every program, all before anyone looks
    row, _, m, n, g, e, p_at, q_at, _ = _matrix(tiles, count, matrices, g_at, e_at, GRADIENT, ALIGNED, RANK)
    q += q_at
    y = row + tl.arange(0, ROWS)
    k = tl.arange(0, WIDE)
    lines = y.to(tl.int64)[:, None] * n
    acc = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    for column in range(0, n, COLUMNS):
        x = column + tl.arange(0, COLUMNS)
        inside = (y < m)[:, None] & (x < n)[None, :]
        g_tile, e_tile = g + lines + x[None, :], e + lines + x[None, :]
        block = tl.load(g_tile, mask=inside, other=0.0).to(tl.float32) + tl.load(e_tile, mask=inside, other=0.0)
        if KEEP:
            tl.store(g_tile, block, mask=inside)
        factor = tl.load(q + k[None, :] * n + x[:, None], mask=(x < n)[:, None] & (k < RANK)[None, :], other=0.0)
        acc = tl.dot(block, factor, acc, input_precision="tf32x3")
    at = p_at + k[None, :] * m + y[:, None]
    tl.store(p + at, acc, mask=(y < m)[:, None] & (k < RANK)[None, :])
    tl.store(own + at, acc, mask=(y < m)[:, None] & (k < RANK)[None, :])


@triton.jit(do_not_specialize=["count"])
def reflect(
    tiles, count, matrices, g_at, e_at, p, parts, good,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, ADD: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Mᵀ P for one block of columns and one chunk of rows; M is G + E with ADD, else it lies in the place of G."""
    if FIRST:
        tl.store(good, 1)  # by every program, all before anyone looks
    first, column, m, n, g, e, p_at, _, part_at = _matrix(tiles, count, matrices, g_at, e_at, GRADIENT, ALIGNED, RANK)
    p += p_at
    x = column + tl.arange(0, COLUMNS)
    k = tl.arange(0, WIDE)
    acc = tl.zeros((WIDE, COLUMNS), dtype=tl.float32)  # Qᵀ = Pᵀ M: M is read as it lies
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
def add_parts(tiles, count, matrices, parts, q, own, RANK: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Q for one stretch of a matrix: the sum of its chunks' parts, in order; as the message, and to keep."""
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
def check(x, count, good, SIZE: tl.constexpr):
    """Clear `good` if a stretch of the message holds NaN or Inf."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + at, mask=at < count, other=0.0)
    if tl.max(tl.where(tl.abs(value) < float("inf"), 0, 1), axis=0) > 0:
        tl.store(good, 0)


@triton.jit(do_not_specialize=["count"])
def deliver(
    tiles, count, matrices, g_at, e_at, u, v, own, good,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, ADD: tl.constexpr, LEFT: tl.constexpr, DOT: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """G = U Vᵀ and E = M − U' V'ᵀ for one block of rows, or with ALONE one tile of it.

    M is G + E with ADD, else it lies in the place of G. One factor is the same in both products; `own` is U' if LEFT,
    else V'. Unless `good` E stays as it was, and G becomes NaN: a step is void as a whole.
    """
    row, column, m, n, g, e, p_at, q_at, _ = _matrix(tiles, count, matrices, g_at, e_at, GRADIENT, ALIGNED, RANK)
    commit = tl.load(good) > 0
    u += p_at
    v += q_at
    own += p_at if LEFT else q_at
    y = row + tl.arange(0, ROWS)
    if ALONE:
        x = column + tl.arange(0, COLUMNS)
        _deliver_tile(y, x, m, n, g, e, u, v, own, commit, RANK, WIDE, ADD, LEFT, DOT)
    else:
        for first in range(0, n, COLUMNS):
            x = first + tl.arange(0, COLUMNS)
            _deliver_tile(y, x, m, n, g, e, u, v, own, commit, RANK, WIDE, ADD, LEFT, DOT)


@triton.jit
def _deliver_tile(
    y, x, m, n, g, e, u, v, own, commit,
    RANK: tl.constexpr, WIDE: tl.constexpr, ADD: tl.constexpr, LEFT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    spoil = tl.where(commit, 0.0, float("nan"))
    lines = y.to(tl.int64)[:, None] * n
    inside = (y < m)[:, None] & (x < n)[None, :]
    g_tile, e_tile = g + lines + x[None, :], e + lines + x[None, :]
    owed = tl.load(g_tile, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        owed += tl.load(e_tile, mask=inside, other=0.0)
    if DOT:
        k = tl.arange(0, WIDE)
        left, right = (y < m)[:, None] & (k < RANK)[None, :], (x < n)[None, :] & (k < RANK)[:, None]
        y_at, x_at = k[None, :] * m + y[:, None], k[:, None] * n + x[None, :]
        a, b = tl.load(u + y_at, mask=left, other=0.0), tl.load(v + x_at, mask=right, other=0.0)
        out = tl.dot(a, b, input_precision="tf32x3")
        if LEFT:
            a = tl.load(own + y_at, mask=left, other=0.0)
        else:
            b = tl.load(own + x_at, mask=right, other=0.0)
        owed -= tl.dot(a, b, input_precision="tf32x3")
    else:
        # Where a row is as wide as all threads together, each keeps its columns' factors in registers.
        # Zeros that come from a load which loads nothing lie in registers as the other loads do, and need not be moved.
        out = tl.load(e_tile, mask=(y < 0)[:, None] & (x < n)[None, :], other=0.0)
        for k in range(RANK):
            a = tl.load(u + k * m + y, mask=y < m, other=0.0)
            b = tl.load(v + k * n + x, mask=x < n, other=0.0)
            out += a[:, None] * b[None, :]
            if LEFT:
                a = tl.load(own + k * m + y, mask=y < m, other=0.0)
            else:
                b = tl.load(own + k * n + x, mask=x < n, other=0.0)
            owed -= a[:, None] * b[None, :]
    tl.store(g_tile, out + spoil, mask=inside)
    if commit:
        tl.store(e_tile, owed, mask=inside)
