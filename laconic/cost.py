"""The bytes that a plan sends, computed without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from laconic.codecs.routing import routed
from laconic.comm.dry import dry
from laconic.exchange import Peers, State
from laconic.ledger import Entry, Ledger
from laconic.packing import in_buckets, in_parts, wide_dtype
from laconic.plans.plan import Plan
from laconic.plans.schedules import Sync

Shaped: TypeAlias = Tensor | torch.Size | Sequence[int]
Named: TypeAlias = nn.Module | Mapping[str, Shaped] | Iterable[tuple[str, Shaped]]
Buckets: TypeAlias = Callable[[Mapping[str, Tensor]], Iterable[Sequence[str]]]
"""Which tensors are sent together."""


@dataclass(frozen=True)
class Planned:
    """What one worker sends of one bucket at one step: the collectives of one exchange, in order."""

    step: int
    sync: Sync
    names: tuple[str, ...]
    collectives: tuple[Entry, ...]


def sent_bytes(
    plan: Plan,
    named_tensors: Named,
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
    sent = sum(each.wire_bytes for one in planned(plan, meta(named_tensors), workers) for each in one.collectives)
    return sent / cycle_of(plan)


def cycle_of(plan: Plan) -> int:
    """Return the steps after which what is sent repeats: two periods, as alternating rounds then send both factors."""
    return 2 * plan.schedule.period


def planned(
    plan: Plan,
    tensors: Mapping[str, Tensor],
    workers: int,
    buckets: Buckets = in_buckets,
    machine: int | None = None,
    state: State | None = None,
) -> Iterator[Planned]:
    """List what one worker sends in `cycle_of(plan)` steps from `start` on, by running the codec on meta tensors.

    `machine` is the number of workers of one machine, for plans that group these. `state` is filled with what the codec
    keeps.
    """
    if plan.needs_anchor:  # deltas are fp32 or fp64
        tensors = {name: t.to(wide_dtype(t.dtype)) for name, t in tensors.items()}
    states: State = {} if state is None else state
    start = plan.schedule.start
    for step in range(start, start + cycle_of(plan)):
        for sync in plan.syncs_at(step):
            size = _size(sync, workers, machine)
            codec, chosen = routed(plan.codec_of(sync, step)), tensors
            if sync.fragment is not None:
                chosen = {name: tensors[name] for name in in_parts(tensors, plan.schedule.fragments)[sync.fragment]}
            for names in buckets(chosen) if size > 1 else ():
                ledger = Ledger()
                own = states.setdefault(sync.payload, {})
                dry(codec.average({name: chosen[name] for name in names}, own, Peers(0, size)), ledger, size)
                yield Planned(step, sync, tuple(names), tuple(ledger.entries))


def _size(sync: Sync, workers: int, machine: int | None) -> int:
    if sync.level == "machine":
        if machine is None:
            raise ValueError("a plan with groups of one machine: tell how many workers a machine has.")
        return machine
    return workers if sync.level is None else sync.level


def meta(named: Named) -> dict[str, Tensor]:
    """Return tensors of these shapes without memory."""
    if isinstance(named, nn.Module):
        named = ((name, p) for name, p in named.named_parameters() if p.requires_grad)
    pairs = named.items() if isinstance(named, Mapping) else named
    return {name: torch.empty_like(x, device="meta") if isinstance(x, Tensor) else _empty(x) for name, x in pairs}


def _empty(shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), device="meta")
