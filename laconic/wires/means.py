"""The mean of what several workers said, such that equal stays equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

IN_CACHE = 1 << 17
"""Elements that are averaged at a time: few enough to stay in a core's cache from the first pass to the last."""


def average(rows: Sequence[Tensor], into: Tensor) -> None:
    """Write the mean of rows over `into`, which may be one of them. What the others hold is lost.

    >>> rows = [torch.tensor([1.0, 5.0]), torch.tensor([2.0, 5.0])]
    >>> average(rows, into=rows[1])
    >>> rows[1]
    tensor([1.5000, 5.0000])
    """
    if sums_exactly(into.dtype, len(rows)):
        _scaled_sum(rows, into)
        return
    for at in range(0, into.numel(), IN_CACHE):
        into[at : at + IN_CACHE] = mean([row[at : at + IN_CACHE] for row in rows])


def sums_exactly(dtype: torch.dtype, workers: int) -> bool:
    """Whether equal values survive a plain sum in any order: up to 4 terms do, but 3; from 5 on they round.

    Subnormal numbers, below 1e-38, may lose their last bit.
    """
    return dtype in (torch.float32, torch.float64) and workers in (2, 4)


def _scaled_sum(rows: Sequence[Tensor], into: Tensor) -> None:
    """Add in the order of the rows, each divided before, so that nothing overflows."""
    first, *between, last = rows
    first.mul_(1 / len(rows))
    for row in between:
        first.add_(row, alpha=1 / len(rows))
    torch.add(first, last, alpha=1 / len(rows), out=into)


def mean(rows: Sequence[Tensor]) -> Tensor:
    """Average rows by their distances from the first: where all are equal, the mean is exactly that.

    In fp32 at least, and without rounding where the sum needs none. Integers are rounded to the nearest.
    """
    kind = rows[0].dtype
    if not (kind.is_floating_point or kind.is_complex):
        first, *others = [row.long() for row in rows]
        return first + (torch.stack(others).sub_(first).sum(0).double() / len(rows)).round_().long()
    if kind.itemsize < 4:
        rows = [row.float() for row in rows]
    first, *others = rows
    off = first - others[0]
    for other in others[1:]:
        off += first - other
    result = torch.sub(first, off, alpha=1 / len(rows))  # a difference, for a sum would make 0.0 of -0.0
    if result.device.type == "cpu" and bool(result.sum().isfinite()):
        return result
    # Infinities have no distance, and that of huge numbers may overflow: these are averaged term by term.
    return torch.where(result.isfinite(), result, torch.stack([row / len(rows) for row in rows]).sum(0))
