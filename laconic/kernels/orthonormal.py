"""Orthonormal columns for a batch of thin matrices, for any finite input.

The result is finite for zero matrices, zero columns, linearly dependent columns and entries of 1e-20 or 1e20. Where the
columns are rank-deficient, arbitrary orthonormal columns complete them; in PowerSGD these can only improve the
approximation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.packing import wide_dtype


def orthonormal(x: Tensor) -> Tensor:
    """Return orthonormal columns that span those of `x`, an [..., rows, rank] tensor with rank <= rows.

    Arithmetic and result are fp32 for fp16 and bf16 input.

    >>> orthonormal(torch.zeros(3, 2)).T @ orthonormal(torch.zeros(3, 2))
    tensor([[1., 0.],
            [0., 1.]])
    """
    x = x.to(wide_dtype(x.dtype))
    # Divide each column by its largest entry: in fp32 the square of 1e-20 underflows and that of 1e20 overflows.
    largest = x.abs().amax(dim=-2, keepdim=True)
    x = x / torch.where(largest > 0, largest, 1.0)
    # Householder reflections are orthogonal for any input, so rank deficiency does no harm. `qr` also computes R.
    is_cpu = x.device.type == "cpu"
    q: Tensor = torch.linalg.householder_product(*torch.geqrf(x)) if is_cpu else torch.linalg.qr(x).Q
    return q


def orthonormal_all(xs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Apply `orthonormal` to many matrices, in one batched call for each shape.

    On the CPU one by one, if in a batch not all would begin at a cache line: the last bit depends on that, and so on
    the neighbours, which change with the layout of buckets.
    """
    by_shape: dict[torch.Size, list[str]] = {}
    for name, x in xs.items():
        by_shape.setdefault(x.shape, []).append(name)
    done: dict[str, Tensor] = {}
    for shape, names in by_shape.items():
        some = xs[names[0]]
        if len(names) > 1 and (some.device.type != "cpu" or shape.numel() * wide_dtype(some.dtype).itemsize % 64 == 0):
            done.update(zip(names, orthonormal(torch.stack([xs[name] for name in names])).unbind(), strict=True))
        else:
            done.update((name, orthonormal(xs[name])) for name in names)
    return {name: done[name] for name in xs}
