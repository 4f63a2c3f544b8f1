"""Operations on lists of tensors, on CUDA one kernel for many, as torch's optimizers use them; and many tensors as one
flat tensor, in one call of C++ each way: in Python the overhead for each tensor dominates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

copy_all = torch._foreach_copy_
divide_all = torch._foreach_div_
multiply_all = torch._foreach_mul_
norms = torch._foreach_norm
zero_all = torch._foreach_zero_


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors of one dtype and device, one after another in row-major order, into a new 1-D tensor."""
    flat: Tensor = _flatten_dense_tensors(tensors)
    return flat


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return views of `flat`, in order, with the shapes of `like`."""
    views: Sequence[Tensor] = _unflatten_dense_tensors(flat, like)
    return views
