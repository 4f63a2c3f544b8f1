"""Many tensors as one flat tensor, in one call of C++ each way: in Python the overhead for each tensor dominates."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors of one dtype and device, one after another in row-major order, into a new 1-D tensor."""
    flat: Tensor = _flatten_dense_tensors(tensors)
    return flat


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return views of `flat`, in order, with the shapes of `like`."""
    views: Sequence[Tensor] = _unflatten_dense_tensors(flat, like)
    return views
