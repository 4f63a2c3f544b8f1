"""Which fast path serves a bucket, if any."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from typing import TYPE_CHECKING

import torch

from laconic.wires.wire import Exchange, State, Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from laconic.codecs.low_rank import LowRank

logger = logging.getLogger(__name__)

LARGEST_RANK = 64


def fast_feedback(codec: LowRank, tensors: Tensors, residual: dict[str, Tensor], state: State) -> Exchange | None:
    """Return `ErrorFeedback(codec)` over `tensors` as one fused exchange, or None where only the plain code serves."""
    some = next(iter(tensors.values()), None)
    if some is None or not codec.warm_start or not all(t.is_contiguous() for t in tensors.values()):
        return None
    turns = state.get("turn", {})
    if len({turns.get(name, 0) % 2 for name in tensors}) > 1 and codec.rounds == "alternating":
        return None
    if some.device.type == "cuda" and _has_triton():
        dims = min(min(t.shape[0], t.shape[1:].numel()) for t in tensors.values())
        if some.dtype in (torch.float32, torch.bfloat16, torch.float16) and codec.rank <= min(LARGEST_RANK, dims):
            from laconic.kernels.fused import fused_feedback

            return fused_feedback(codec, tensors, residual, state)
    if some.dtype in (torch.float32, torch.float64) and some.device.type != "meta":
        from laconic.kernels.dense import dense_feedback

        return dense_feedback(codec, tensors, residual, state)
    return None


def can_collect(tensors: Tensors) -> bool:
    """Tell whether many small tensors on CUDA can be gathered in one launch, and whether that is worth it."""
    some = next(iter(tensors.values()), None)
    if some is None or len(tensors) < 4 or some.device.type != "cuda" or not some.dtype.is_floating_point:
        return False
    small = sum(t.numel() for t in tensors.values()) < 1 << 22
    return small and all(t.is_contiguous() and t.numel() for t in tensors.values()) and _has_triton()


def own_is_owed() -> dict[str, Tensor]:
    """Say why a fused exchange has no own part to show."""
    raise RuntimeError("the own part went into the residual. Ask with reuse=False to keep it.")


@cache
def _has_triton() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    logger.warning("Triton is not installed: PowerSGD on CUDA goes through plain matrix products, which are slower.")
    return False
