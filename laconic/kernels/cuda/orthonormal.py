"""Orthonormal factors on CUDA: the host side of `triton_orthonormal`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.kernels.cuda import triton_orthonormal as kernels
from laconic.kernels.cuda.launches import Launch


class Orthonormal:
    """Makes the columns of many thin matrices, [rank, rows] each, orthonormal; `row_at` is where they begin.

    `work` is room for as many numbers as they have, of no use to anyone in between.
    """

    def __init__(self, rows: Sequence[int], row_at: Sequence[int], rank: int, work: Tensor) -> None:
        device = work.device
        self.rank, self.wide = rank, max(16, 1 << (rank - 1).bit_length())
        places = [(i, y) for i, m in enumerate(rows) for y in range(0, m, kernels.ROWS_A_TILE)]
        self.count, self.matrices = len(places), len(rows)
        self.tiles = torch.tensor(places, dtype=torch.int32).t().contiguous().to(device)
        first = [0] + [sum(1 for i, _ in places if i <= matrix) for matrix in range(len(rows))]
        self.first = torch.tensor(first, dtype=torch.int32).to(device)
        self.rows = torch.tensor(rows, dtype=torch.int32).to(device)
        self.row_at = torch.tensor(row_at, dtype=torch.int32).to(device)
        self.work = work
        self.grams = torch.empty(self.count, self.wide, self.wide, dtype=torch.float64, device=device)
        self.weights = torch.empty(self.matrices, self.wide, self.wide, dtype=torch.float64, device=device)
        self.gone = torch.empty(self.matrices, self.wide, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor, into: Tensor, good: Tensor) -> list[Launch]:
        """Launches that write orthonormal columns which span those of `x`; not for zeros or NaN, nor unless `good`."""
        found = []
        for number in range(kernels.PASSES + 1):  # the first only looks
            last = number == kernels.PASSES
            multiply = {
                "tiles": self.tiles, "count": self.count, "rows_of": self.rows, "row_at": self.row_at,
                "x": self.work if number > 1 else x, "weights": self.weights,
                "gone": self.gone, "good": good, "into": into if last else self.work, "parts": self.grams,
                "FIRST": number == 0, "LAST": last, "RANK": self.rank, "WIDE": self.wide,
                "ROWS": kernels.NUMBERS_AT_ONCE // self.wide, "ROWS_A_TILE": kernels.ROWS_A_TILE,
            }  # fmt: skip
            found.append(Launch(kernels.multiply, self.count, multiply, {"num_warps": 4}))
            inverse = {
                "first_tile": self.first, "parts": self.grams, "weights": self.weights, "gone": self.gone,
                "FIRST": number == 0, "RANK": self.rank, "WIDE": self.wide, "TILES": 8 if self.wide <= 16 else 1,
                "LEAST": kernels.LEAST, "ROUNDING": kernels.ROUNDING,
            }  # fmt: skip
            if not last:
                warps = 1 if self.wide <= 16 else 4
                found.append(Launch(kernels.inverse, self.matrices, inverse, {"num_warps": warps}))
        return found
