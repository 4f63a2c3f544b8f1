"""Orthonormal columns for a batch of thin matrices, whatever they hold.

Never NaN or Inf for finite input: zero matrices, zero columns, columns that depend on each other, entries of
1e-20 or 1e20. Where the columns span less than they should, arbitrary orthonormal ones complete them; for
PowerSGD these can only help.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from laconic.codecs.contract import wide_dtype


def orthonormal(x: Tensor) -> Tensor:
    """Return orthonormal columns that span those of `x`, an [..., rows, rank] tensor with rank <= rows.

    Arithmetic and result are fp32 for fp16 and bf16 input.

    >>> orthonormal(torch.zeros(3, 2)).T @ orthonormal(torch.zeros(3, 2))
    tensor([[1., 0.],
            [0., 1.]])
    """
    x = x.to(wide_dtype(x.dtype))
    # Each column by its largest entry first: squares of 1e-20 vanish and squares of 1e20 overflow in fp32.
    largest = x.abs().amax(dim=-2, keepdim=True)
    x = x / torch.where(largest > 0, largest, 1.0)
    # Householder reflections are orthogonal whatever they reflect, so rank deficiency costs nothing.
    q: Tensor = torch.linalg.qr(x).Q
    return q


def orthonormal_all(xs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Apply `orthonormal` to many matrices: one batched call for all of a shape."""
    by_shape: dict[torch.Size, list[str]] = {}
    for name, x in xs.items():
        by_shape.setdefault(x.shape, []).append(name)
    done: dict[str, Tensor] = {}
    for names in by_shape.values():
        done.update(zip(names, orthonormal(torch.stack([xs[name] for name in names])), strict=True))
    return _in_order(done, xs)


def _in_order(done: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    return {name: done[name] for name in names}
