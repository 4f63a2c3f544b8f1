"""Which fast path serves a bucket, if any."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch

from laconic.comm.requests import Exchange, State, Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from laconic.codecs.low_rank import LowRank

logger = logging.getLogger(__name__)

LARGEST_RANK = 64
_SMALL = 1 << 22
"""Up to so many numbers are worth copying into one message."""


def fast_feedback(codec: LowRank, tensors: Tensors, residual: dict[str, Tensor], state: State) -> Exchange | None:
    """Return `ErrorFeedback(codec)` over `tensors` as one fused exchange, or None where only the plain code serves."""
    some = next(iter(tensors.values()), None)
    if some is None or not _in_step(codec, tensors, state):
        return None
    if _has_kernels(codec, tensors):
        from laconic.kernels.cuda.fused import fused_feedback

        return fused_feedback(codec, tensors, residual, state)
    if some.dtype in (torch.float32, torch.float64) and some.device.type != "meta":
        from laconic.kernels.cpu import dense_feedback

        return dense_feedback(codec, tensors, residual, state)
    return None


def fast_by_shape(
    codec: LowRank, split: Callable[[Tensors], tuple[Tensors, Tensors]], tensors: Tensors, state: State
) -> Exchange | None:
    """Return `ByShape(ErrorFeedback(codec))` as one fused exchange, where all of it can share one message on CUDA."""
    known = state.get("_bound", {}).get(id(tensors))
    if known is not None and known.still(codec, tensors):
        exchange: Exchange = known.exchange()
        return exchange
    some = next(iter(tensors.values()), None)
    if some is None or some.device.type != "cuda" or some.dtype != torch.float32:
        return None  # factors are fp32, and what has another dtype travels beside them
    matrices, rest = split(tensors)
    inner = state.setdefault("codec", {}).setdefault("inner", {})
    if not matrices or not _in_step(codec, matrices, inner) or not _has_kernels(codec, matrices):
        return None
    if sum(t.numel() for t in rest.values()) > _SMALL or not all(t.is_contiguous() for t in rest.values()):
        return None
    from laconic.kernels.cuda.fused import bind

    bound = bind(codec, matrices, rest, tensors, state["codec"].setdefault("residual", {}), inner)
    groups = inner["_fused"].values()
    others = [each for each in state.get("_bound", {}).values() if each.group in groups and each.group != bound.group]
    state["_bound"] = {id(each.tensors): each for each in (*others, bound)}
    return bound.exchange()


def can_collect(tensors: Tensors) -> bool:
    """Tell whether many small tensors on CUDA can be gathered in one launch, and whether that is worth it."""
    some = next(iter(tensors.values()), None)
    if some is None or len(tensors) < 4 or some.device.type != "cuda" or not some.dtype.is_floating_point:
        return False
    small = sum(t.numel() for t in tensors.values()) < _SMALL
    return small and all(t.is_contiguous() and t.numel() for t in tensors.values()) and _has_triton()


def own_is_owed() -> dict[str, Tensor]:
    """Say why a fused exchange has no own part to show."""
    raise RuntimeError("the own part went into the residual. Ask with reuse=False to keep it.")


def _in_step(codec: LowRank, tensors: Tensors, state: State) -> bool:
    """Tell whether all matrices lie row by row, and have the same turn."""
    if not codec.warm_start or not all(t.is_contiguous() for t in tensors.values()):
        return False
    turns = state.get("turn", {})
    return codec.rounds == "two" or len({turns.get(name, 0) % 2 for name in tensors}) == 1


def _has_kernels(codec: LowRank, tensors: Tensors) -> bool:
    some = next(iter(tensors.values()))
    if some.device.type != "cuda" or not _has_triton():
        return False
    smallest = min(min(t.shape[0], t.shape[1:].numel()) for t in tensors.values())
    return some.dtype in (torch.float32, torch.bfloat16, torch.float16) and codec.rank <= min(LARGEST_RANK, smallest)


@cache
def _has_triton() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    logger.warning("Triton is not installed: PowerSGD on CUDA goes through plain matrix products, which are slower.")
    return False
