"""Choose the fused path for a bucket, if one serves it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch

from laconic.exchange import Averaged, Exchange, Peers, Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from laconic.codecs.low_rank import LowRank
    from laconic.codecs.low_rank_state import Factors
    from laconic.codecs.quantized import Quantized

logger = logging.getLogger(__name__)

MAX_RANK = 64
_MAX_COPIED = 1 << 22
"""Up to so many numbers, a copy into one message costs less than a message of its own."""


def fast_feedback(
    codec: LowRank, tensors: Tensors, residual: dict[str, Tensor], factors: Factors, peers: Peers
) -> Exchange[Averaged] | None:
    """Return `ErrorFeedback(codec)` over `tensors` as one fused exchange, or None where only the plain code serves."""
    some = next(iter(tensors.values()), None)
    if some is None or not _can_fuse(codec, tensors, factors):
        return None
    if _has_kernels(codec, tensors):
        from laconic.kernels.cuda.fused import fused_feedback

        return fused_feedback(codec, tensors, residual, factors, peers)
    if some.dtype in (torch.float32, torch.float64) and some.device.type != "meta":
        from laconic.kernels.cpu import dense_feedback

        return dense_feedback(codec, tensors, residual, factors, peers)
    return None


def can_fuse_all(tensors: Tensors) -> bool:
    """Return whether all tensors of a bucket can share one fp32 message on CUDA, as `fast_by_shape` needs it."""
    some = next(iter(tensors.values()), None)
    return some is not None and some.device.type == "cuda" and some.dtype == torch.float32


def fast_by_shape(
    codec: LowRank,
    split: Callable[[Tensors], tuple[Tensors, Tensors]],
    tensors: Tensors,
    residual: dict[str, Tensor],
    factors: Factors,
    peers: Peers,
) -> Exchange[Averaged] | None:
    """Return `ByShape(ErrorFeedback(codec))` as one fused exchange on CUDA, or None."""
    cached = factors.cache("bound")
    known = cached.get(id(tensors))
    if known is not None and known.is_current(codec, tensors):
        exchange: Exchange[Averaged] = known.exchange(peers)
        return exchange
    matrices, rest = split(tensors)
    if not matrices or not _can_fuse(codec, matrices, factors) or not _has_kernels(codec, matrices):
        return None
    if sum(t.numel() for t in rest.values()) > _MAX_COPIED or not all(t.is_contiguous() for t in rest.values()):
        return None
    from laconic.kernels.cuda.fused import bind

    bound = bind(codec, matrices, rest, tensors, residual, factors)
    buckets = factors.cache("fused").values()
    for key in [key for key, other in cached.items() if other.bucket is bound.bucket or other.bucket not in buckets]:
        del cached[key]
    cached[id(tensors)] = bound
    return bound.exchange(peers)


def can_collect(tensors: Tensors) -> bool:
    """Return whether one launch can copy many small CUDA tensors into one, and whether that is worth it."""
    some = next(iter(tensors.values()), None)
    if some is None or len(tensors) < 4 or some.device.type != "cuda" or not some.dtype.is_floating_point:
        return False
    small = sum(t.numel() for t in tensors.values()) < _MAX_COPIED
    return small and all(t.is_contiguous() and t.numel() for t in tensors.values()) and _has_triton()


def can_encode(rows: Tensor, block: int, least: int = 16, most: int = 8192) -> bool:
    """Return whether a kernel encodes such rows."""
    return rows.dtype == torch.float32 and _has_row_kernels(rows, block, least, most)


def can_decode(messages: Tensor, dtype: torch.dtype, block: int, least: int = 16, most: int = 8192) -> bool:
    """Return whether a kernel decodes such messages."""
    return dtype == torch.float32 and _has_row_kernels(messages, block, least, most)


def can_fuse_rows(codec: Quantized, tensors: Tensors, residual: Tensors) -> bool:
    """Return whether kernels serve `ErrorFeedback(codec)`, in the memory of these tensors and residuals."""
    some = next(iter(tensors.values()), None)
    if some is None or codec.rounding != "nearest" or not _has_row_kernels(some, codec.block):
        return False
    if some.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    kept = [residual[name] for name in tensors if name in residual]
    wide = all(e.dtype == torch.float32 and e.device == some.device for e in kept)
    return wide and all(t.is_contiguous() and t.numel() for t in [*tensors.values(), *kept])


def _has_row_kernels(t: Tensor, block: int, least: int = 16, most: int = 8192) -> bool:
    return t.device.type == "cuda" and not block & (block - 1) and least <= block <= most and _has_triton()


def _can_fuse(codec: LowRank, tensors: Tensors, factors: Factors) -> bool:
    """Return whether all matrices are contiguous and send the same factor at this call."""
    if not codec.warm_start or not all(t.is_contiguous() for t in tensors.values()):
        return False
    return codec.rounds == "two" or factors.in_step(tensors)


def _has_kernels(codec: LowRank, tensors: Tensors) -> bool:
    some = next(iter(tensors.values()))
    if some.device.type != "cuda" or not _has_triton():
        return False
    smallest = min(min(t.shape[0], t.shape[1:].numel()) for t in tensors.values())
    return some.dtype in (torch.float32, torch.bfloat16, torch.float16) and codec.rank <= min(MAX_RANK, smallest)


@cache
def _has_triton() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    logger.warning("Triton is not installed: codecs on CUDA use plain torch operations, which are slower.")
    return False
