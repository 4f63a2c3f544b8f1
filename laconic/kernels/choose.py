"""Which tensors the kernels serve. Codecs ask only for CUDA tensors: a CPU has no kernels."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache

import torch
from torch import Tensor

from laconic.exchange import Tensors

logger = logging.getLogger(__name__)

MAX_RANK = 64
MAX_COPIED = 1 << 22
"""Up to so many numbers, a copy into one message costs less than a message of its own."""


def can_collect(tensors: Tensors) -> bool:
    """Return whether one launch can copy many small CUDA tensors into one, and whether that is worth it."""
    some = next(iter(tensors.values()))
    if len(tensors) < 4 or not some.dtype.is_floating_point:
        return False
    small = sum(t.numel() for t in tensors.values()) < MAX_COPIED
    return small and all(t.is_contiguous() and t.numel() for t in tensors.values()) and _has_triton()


def has_matrix_kernels(tensors: Tensors, rank: int) -> bool:
    """Return whether kernels compute thin factors of this rank of these matrices."""
    some = next(iter(tensors.values()))
    if some.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not _has_triton():
        return False
    return rank <= min(MAX_RANK, *(min(t.shape[0], t.shape[1:].numel()) for t in tensors.values()))


def has_row_kernels(t: Tensor, dtype: torch.dtype, block: int, least: int = 16) -> bool:
    """Return whether kernels serve rows of `block` numbers of `dtype`; `t` holds the rows, or messages about them."""
    if not t.is_cuda or dtype != torch.float32:
        return False
    return not block & (block - 1) and least <= block <= 8192 and _has_triton()


def has_feedback_kernels(tensors: Tensors, residual: Tensors, block: int) -> bool:
    """Return whether kernels average these tensors in few bits with error feedback, in their own memory."""
    some = next(iter(tensors.values()))
    if some.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    kept = [residual[name] for name in tensors if name in residual]
    if not all(e.dtype == torch.float32 and e.device == some.device for e in kept):
        return False
    plain = all(t.is_contiguous() and t.numel() for t in [*tensors.values(), *kept])
    return plain and has_row_kernels(some, torch.float32, block)


@cache
def _has_triton() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    logger.warning("Triton is not installed: codecs on CUDA use plain torch operations, which are slower.")
    return False
