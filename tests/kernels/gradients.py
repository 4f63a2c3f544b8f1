"""Gradients for the tests of the kernels, and how results are compared."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.exchange import State
from tests.laws.world import averaged

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "square": [(64, 64)],
    "odd": [(37, 53), (129, 65), (33, 200), (301, 35)],
    "repeated": [(48, 40), (48, 40), (48, 40), (48, 40), (48, 40), (40, 48), (40, 48), (40, 48)],
    "convolution": [(64, 16, 3, 3), (32, 64, 1, 1)],
    "tall and wide": [(2500, 34), (34, 1500)],
}


def inputs(
    shapes: Sequence[tuple[int, ...]], workers: int, step: int, device: str, dtype: torch.dtype
) -> list[dict[str, Tensor]]:
    """Return gradients in one flat bucket for each worker: fixed directions with a ratio of 4, and a little noise.

    On noise alone power iteration does not converge, and any two implementations diverge.
    """
    result = []
    for worker in range(workers):
        fixed = torch.Generator().manual_seed(worker)
        noise = torch.Generator().manual_seed(1000 * step + worker + 1)
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = 1e-3 * torch.randn(sum(sizes), generator=noise)
        for piece, shape in zip(flat.split(sizes), shapes, strict=True):
            matrix = piece.view(shape[0], -1)
            for power in range(min(6, *matrix.shape)):
                u = torch.randn(matrix.shape[0], generator=fixed)
                v = torch.randn(matrix.shape[1], generator=fixed)
                matrix += 0.25**power * torch.outer(u, v) * (1 + 0.1 * torch.randn((), generator=noise))
        pieces = flat.to(device=device, dtype=dtype).split(sizes)
        result.append({f"w{i}": p.view(shape) for i, (p, shape) in enumerate(zip(pieces, shapes, strict=True))})
    return result


def run(codec: Any, tensors: list[dict[str, Tensor]], states: list[State], fast: bool) -> list[dict[str, Tensor]]:
    """Return each worker's means; `fast` lets the codec overwrite `tensors`, which the fused paths need."""
    given = tensors if fast else copy.deepcopy(tensors)
    ends = averaged(codec, given, states, reuse=fast)
    return [end.mean for end in ends]


def close(a: Tensor, b: Tensor, tolerance: float, of: Tensor | None = None) -> None:
    """Assert that `a` and `b` differ by at most `tolerance` of the norm of `of`, or of `b`."""
    a, b = a.double().cpu(), b.double().cpu()
    size = float((b if of is None else of.double()).norm())
    assert float((a - b).norm()) <= tolerance * size + 1e-30, f"off by {(a - b).norm() / size:.2e}"
