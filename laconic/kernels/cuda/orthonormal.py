"""Orthonormal factors on CUDA: the host side of `triton_orthonormal`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.kernels.cuda import triton_orthonormal as kernels
from laconic.kernels.cuda.launches import Launch


class Orthonormal:
    """Makes the columns of many thin matrices, [rank, rows] each, orthonormal; `row_at` are their offsets in rows.

    `work` is scratch memory of the same size.
    """

    def __init__(self, rows: Sequence[int], row_at: Sequence[int], rank: int, work: Tensor) -> None:
        device = work.device
        self.rank, self.padded_rank = rank, max(16, 1 << (rank - 1).bit_length())
        places = [(i, y) for i, m in enumerate(rows) for y in range(0, m, kernels.ROWS_A_TILE)]
        self.count, self.matrices = len(places), len(rows)
        self.tiles = torch.tensor(places, dtype=torch.int32).t().contiguous().to(device)
        first = [0] + [sum(1 for i, _ in places if i <= matrix) for matrix in range(len(rows))]
        self.first = torch.tensor(first, dtype=torch.int32).to(device)
        self.rows = torch.tensor(rows, dtype=torch.int32).to(device)
        self.row_at = torch.tensor(row_at, dtype=torch.int32).to(device)
        self.work = work
        self.grams = torch.empty(self.count, self.padded_rank, self.padded_rank, dtype=torch.float64, device=device)
        self.weights = torch.empty(
            self.matrices, self.padded_rank, self.padded_rank, dtype=torch.float64, device=device
        )
        self.status = torch.empty(self.matrices, self.padded_rank, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor, into: Tensor, finite: Tensor) -> list[Launch]:
        """Return launches that write orthonormal columns with the span of `x`, unless `x` is zero or non-finite."""
        found = []
        for number in range(kernels.PASSES + 1):  # the first pass only computes XᵀX
            last = number == kernels.PASSES
            multiply = {
                "tiles": self.tiles, "count": self.count, "rows_of": self.rows, "row_at": self.row_at,
                "x": self.work if number > 1 else x, "weights": self.weights,
                "status": self.status, "finite": finite, "into": into if last else self.work, "parts": self.grams,
                "FIRST": number == 0, "LAST": last, "RANK": self.rank, "PADDED_RANK": self.padded_rank,
                "ROWS": kernels.NUMBERS_AT_ONCE // self.padded_rank, "ROWS_A_TILE": kernels.ROWS_A_TILE,
            }  # fmt: skip
            found.append(Launch(kernels.multiply, self.count, multiply, {"num_warps": 4}))
            inverse = {
                "first_tile": self.first, "parts": self.grams, "weights": self.weights, "status": self.status,
                "FIRST": number == 0, "RANK": self.rank, "PADDED_RANK": self.padded_rank,
                "TILES": 8 if self.padded_rank <= 16 else 1,
                "PIVOT_MIN": kernels.PIVOT_MIN, "PIVOT_NOISE": kernels.PIVOT_NOISE,
            }  # fmt: skip
            if not last:
                warps = 1 if self.padded_rank <= 16 else 4
                found.append(Launch(kernels.inverse, self.matrices, inverse, {"num_warps": warps}))
        return found
