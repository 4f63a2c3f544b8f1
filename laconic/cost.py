"""The bytes that a plan sends, computed without running it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from laconic.codecs import ByShape, Codec
from laconic.codecs.contract import wide_dtype
from laconic.codecs.packing import in_buckets, in_parts
from laconic.comm.dry import dry
from laconic.comm.requests import State
from laconic.ledger import Ledger
from laconic.plans.plan import Plan

Shaped = Tensor | torch.Size | Sequence[int]


def sent_bytes(
    plan: Plan,
    named_tensors: nn.Module | Mapping[str, Shaped] | Iterable[tuple[str, Shaped]],
    workers: int = 2,
) -> float:
    """Return the bytes that one worker sends at one step, without communication.

    The codec runs on meta tensors, and its requests are counted (`comm/dry.py`). Where steps differ, because of a
    period or of alternating rounds, the result is the average over steps from `start` on. Shapes count as float32.

    >>> from laconic import ddp, power_sgd
    >>> sent_bytes(ddp(), {"weight": (512, 512)}), sent_bytes(power_sgd(rank=4), {"weight": (512, 512)})
    (1048576.0, 2112.0)
    """
    if workers < 1 or workers != int(workers):
        raise ValueError(f"sent_bytes(workers={workers!r}): workers must be a whole number of at least 1.")
    tensors = _meta(named_tensors)
    if plan.needs_anchor:  # deltas are fp32 or fp64
        tensors = {name: t.to(wide_dtype(t.dtype)) for name, t in tensors.items()}
    ledger, state = Ledger(), State()
    start = plan.schedule.start
    cycle = 2 * plan.schedule.period  # two periods: alternating rounds then send both factors
    for step in range(start, start + cycle):
        for sync in plan.syncs_at(step) if workers > 1 else ():
            codec, chosen = routed(plan.codec_of(sync, step)), tensors
            if sync.part is not None:
                chosen = {name: tensors[name] for name in in_parts(tensors, plan.schedule.fragments)[sync.part]}
            for names in in_buckets(chosen):
                dry(codec.average({name: chosen[name] for name in names}, state), ledger, workers)
    return ledger.wire_bytes / cycle


def routed(codec: Codec) -> Codec:
    """Return a codec for all shapes: `codec` itself, or with what it declines sent exactly."""
    return codec if codec.accepts(torch.Size([])) else ByShape(codec)


def _meta(named: nn.Module | Mapping[str, Shaped] | Iterable[tuple[str, Shaped]]) -> dict[str, Tensor]:
    if isinstance(named, nn.Module):
        named = ((name, p) for name, p in named.named_parameters() if p.requires_grad)
    pairs = named.items() if isinstance(named, Mapping) else named
    return {name: torch.empty_like(x, device="meta") if isinstance(x, Tensor) else _empty(x) for name, x in pairs}


def _empty(shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), device="meta")
