"""PowerSGD with error feedback as grouped Triton kernels: one launch over all matrices of a bucket for each phase.

    project     M = G + E;  P = M Q            one pass over G and E
    reflect     Q = Mᵀ P                       one pass, in row chunks whose parts are then added up
    deliver     G = U Vᵀ;  E = M − U' V'ᵀ      one pass: what all said, and what this worker still owes

All matrices share one rank, so their factors lie side by side in one [rank, all rows] tensor, which is also the
message. A table of tiles tells each program its matrix and place. Arithmetic is fp32 (tf32x3 on the tensor cores, which
keeps fp32's precision), whatever the gradients' dtype. Residuals are fp32. Nothing here waits for the device.
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

    @property
    def options(self) -> dict[str, int]:
        """The same as a launch takes it."""
        return {"ROWS": self.rows, "COLUMNS": self.columns, "num_warps": self.warps, "num_stages": self.stages}


PROJECT = Blocks(32, 32, warps=2, stages=4)
REFLECT = Blocks(32, 64, warps=2, stages=4)
DELIVER = Blocks(16, 128, warps=2, stages=1)
CHUNK_ROWS = 1024
"""Rows that one program of `reflect` adds up."""


@triton.jit
def _matrix(tables, tile, stride):
    """The matrix of a tile: its number, first row and first column there."""
    i = tl.load(tables + tile)
    return i, tl.load(tables + stride + tile), tl.load(tables + 2 * stride + tile)


@triton.jit
def project(
    tiles, stride, g_at, e_at, rows_of, columns_of, p_at, q_at, q, q_all, p, p_all,
    GRADIENT: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """P = (G + E) Q for one block of rows."""
    i, row, _ = _matrix(tiles, tl.program_id(0), stride)
    m, n = tl.load(rows_of + i), tl.load(columns_of + i)
    g = tl.load(g_at + i).to(tl.pointer_type(GRADIENT))
    e = tl.load(e_at + i).to(tl.pointer_type(tl.float32))
    q += tl.load(q_at + i)
    y = row + tl.arange(0, ROWS)
    k = tl.arange(0, WIDE)
    acc = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    for column in range(0, n, COLUMNS):
        x = column + tl.arange(0, COLUMNS)
        inside = (y < m)[:, None] & (x < n)[None, :]
        at = y.to(tl.int64)[:, None] * n + x[None, :]
        block = tl.load(g + at, mask=inside, other=0.0).to(tl.float32) + tl.load(e + at, mask=inside, other=0.0)
        factor = tl.load(q + k[None, :] * q_all + x[:, None], mask=(x < n)[:, None] & (k < RANK)[None, :], other=0.0)
        acc += tl.dot(block, factor, input_precision="tf32x3")
    p += tl.load(p_at + i)
    tl.store(p + k[None, :] * p_all + y[:, None], acc, mask=(y < m)[:, None] & (k < RANK)[None, :])


@triton.jit
def reflect(
    tiles, stride, g_at, e_at, rows_of, columns_of, p_at, part_at, p, p_all, parts,
    GRADIENT: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(G + E)ᵀ P for one block of columns and one chunk of rows."""
    i, first, column = _matrix(tiles, tl.program_id(0), stride)
    m, n = tl.load(rows_of + i), tl.load(columns_of + i)
    g = tl.load(g_at + i).to(tl.pointer_type(GRADIENT))
    e = tl.load(e_at + i).to(tl.pointer_type(tl.float32))
    p += tl.load(p_at + i)
    x = column + tl.arange(0, COLUMNS)
    k = tl.arange(0, WIDE)
    acc = tl.zeros((COLUMNS, WIDE), dtype=tl.float32)
    last = tl.minimum(first + CHUNK, m)
    for row in range(first, last, ROWS):
        y = row + tl.arange(0, ROWS)
        inside = (y < last)[:, None] & (x < n)[None, :]
        at = y.to(tl.int64)[:, None] * n + x[None, :]
        block = tl.load(g + at, mask=inside, other=0.0).to(tl.float32) + tl.load(e + at, mask=inside, other=0.0)
        factor = tl.load(p + k[None, :] * p_all + y[:, None], mask=(y < last)[:, None] & (k < RANK)[None, :], other=0.0)
        acc += tl.dot(tl.trans(block), factor, input_precision="tf32x3")
    # Parts of one chunk lie together: [chunk, rank, columns].
    part = tl.load(part_at + i) + (first // CHUNK) * n
    parts += part.to(tl.int64) * RANK
    tl.store(parts + k[None, :] * n + x[:, None], acc, mask=(x < n)[:, None] & (k < RANK)[None, :])


@triton.jit
def add_parts(
    tiles, stride, rows_of, columns_of, q_at, part_at, parts, q, q_all,
    RANK: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Q for one stretch of a matrix: the sum of its chunks' parts, in order."""
    i, first, _ = _matrix(tiles, tl.program_id(0), stride)
    m, n = tl.load(rows_of + i), tl.load(columns_of + i)
    at = first + tl.arange(0, SIZE)
    inside = at < n * RANK
    parts += tl.load(part_at + i).to(tl.int64) * RANK
    acc = tl.zeros((SIZE,), dtype=tl.float32)
    for chunk in range(0, tl.cdiv(m, CHUNK)):
        acc += tl.load(parts + chunk * n * RANK + at, mask=inside, other=0.0)
    tl.store(q + (at // n) * q_all + tl.load(q_at + i) + at % n, acc, mask=inside)


@triton.jit
def deliver(
    tiles, stride, g_at, e_at, rows_of, columns_of, p_at, q_at, u, v, own_u, own_v, p_all, q_all, good,
    GRADIENT: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """G = U Vᵀ and E = G + E − U' V'ᵀ for one block of rows; E stays as it was unless `good`."""
    i, row, _ = _matrix(tiles, tl.program_id(0), stride)
    m, n = tl.load(rows_of + i), tl.load(columns_of + i)
    g = tl.load(g_at + i).to(tl.pointer_type(GRADIENT))
    e = tl.load(e_at + i).to(tl.pointer_type(tl.float32))
    p_from, q_from = tl.load(p_at + i), tl.load(q_at + i)
    commit = tl.load(good) > 0
    y = row + tl.arange(0, ROWS)
    k = tl.arange(0, WIDE)
    left = (y < m)[:, None] & (k < RANK)[None, :]
    y_at = k[None, :] * p_all + p_from + y[:, None]
    a = tl.load(u + y_at, mask=left, other=0.0)
    own_a = tl.load(own_u + y_at, mask=left, other=0.0)
    for column in range(0, n, COLUMNS):
        x = column + tl.arange(0, COLUMNS)
        inside = (y < m)[:, None] & (x < n)[None, :]
        at = y.to(tl.int64)[:, None] * n + x[None, :]
        owed = tl.load(g + at, mask=inside, other=0.0).to(tl.float32) + tl.load(e + at, mask=inside, other=0.0)
        right = (x < n)[None, :] & (k < RANK)[:, None]
        x_at = k[:, None] * q_all + q_from + x[None, :]
        out = tl.dot(a, tl.load(v + x_at, mask=right, other=0.0), input_precision="tf32x3")
        owed -= tl.dot(own_a, tl.load(own_v + x_at, mask=right, other=0.0), input_precision="tf32x3")
        tl.store(g + at, out, mask=inside)
        if commit:
            tl.store(e + at, owed, mask=inside)
