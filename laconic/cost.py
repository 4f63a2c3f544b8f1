"""The bytes that a plan sends, computed without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from laconic.codecs import ByShape, Codec, ErrorFeedback, Exact, LowRank, Quantized
from laconic.codecs.quantized import width
from laconic.codecs.routing import routed
from laconic.codecs.shards import bytes_in_shards
from laconic.comm.averaging import in_pieces
from laconic.comm.dry import dry
from laconic.exchange import Averaged, Exchange, First, Peers, State, true
from laconic.ledger import Entry, Ledger, wire_bytes
from laconic.packing import bucketed, in_buckets, in_parts, pack, wide_dtype
from laconic.plans.plan import Plan
from laconic.plans.schedules import Every, Payload, Streaming, Sync
from laconic.plans.targets import Kind, ModelFacts

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
    buffers: Named | None = None,
) -> float:
    """Return the bytes that one worker sends at one step, without communication.

    The codec runs on meta tensors, and its requests are counted (`comm/dry.py`). Where steps differ, because of a
    period or of alternating rounds, the result is the average over steps from `start` on. Shapes count as float32.
    `buffers`, by default those of a module, are sent with each round of weights as the plan says. Those that a DDP
    model broadcasts at each step of gradients, as DDP does, are not counted.

    >>> from laconic import ddp, frugal, power_sgd
    >>> sent_bytes(ddp(), {"weight": (512, 512)}), sent_bytes(power_sgd(rank=4), {"weight": (512, 512)})
    (1048576.0, 2112.0)
    >>> sent_bytes(frugal("60x"), {"weight": (512, 512)}) <= sent_bytes(ddp(), {"weight": (512, 512)}) / 60
    True
    """
    if workers < 1 or workers != int(workers):
        raise ValueError(f"sent_bytes(workers={workers!r}): workers must be a whole number of at least 1.")
    facts = facts_of(named_tensors, workers, buffers)
    return _sent(plan.resolved(facts), facts.tensors, facts.buffers, workers)


def facts_of(
    named: Named, workers: int, buffers: Named | None = None, optimizers: Sequence[Kind] = ("adaptive",)
) -> ModelFacts:
    """Return what a target of bytes is resolved from; one worker, which others may join, counts as two."""
    if buffers is None:
        buffers = dict(named.named_buffers()) if isinstance(named, nn.Module) else {}
    tensors, held, workers = meta(named), meta(buffers), max(2, workers)
    count = partial(quick_bytes, tensors=tensors, buffers=held, workers=workers)
    return ModelFacts(tensors, held, tuple(optimizers), workers, count)


def _sent(plan: Plan, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], workers: int) -> float:
    sent = planned(plan, tensors, workers, buffers=buffers)
    return sum(each.wire_bytes for one in sent for each in one.collectives) / cycle_of(plan)


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
    buffers: Mapping[str, Tensor] | None = None,
) -> Iterator[Planned]:
    """List what one worker sends in `cycle_of(plan)` steps from `start` on, by running the codec on meta tensors.

    `machine` is the number of workers of one machine, for plans that group these. `state` is filled with what the codec
    keeps. `buffers` are those of the model, which rounds of weights send, too.
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
                own = states.setdefault(sync.payload, {})
                exchange = codec.average({name: chosen[name] for name in names}, own, Peers(0, size))
                yield Planned(step, sync, tuple(names), _counted(exchange, size))
            for exchange in _of_buffers(plan, sync, buffers or {}, size):
                yield Planned(step, sync, (), _counted(exchange, size))


def _counted(exchange: Exchange[Averaged], workers: int) -> tuple[Entry, ...]:
    ledger = Ledger()
    dry(exchange, ledger, workers)
    return tuple(ledger.entries)


def _of_buffers(plan: Plan, sync: Sync, buffers: Mapping[str, Tensor], workers: int) -> Iterator[Exchange[Averaged]]:
    """Yield what is sent of buffers in a round of weights, with its first fragment: see `WeightSync.sync`."""
    if sync.payload is not Payload.WEIGHTS or sync.fragment or workers == 1:
        return
    if plan.buffers == "average":
        yield from in_pieces({name: b for name, b in buffers.items() if b.is_floating_point()}, workers)
    elif plan.buffers == "leader":
        yield from (_from_first(bucket) for bucket in bucketed(buffers))


def _from_first(tensors: Mapping[str, Tensor]) -> Exchange[Averaged]:
    yield First(pack(tensors))
    return Averaged(dict(tensors), dict, true)


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


# The same without running the codec, which takes seconds on large models: to try many ranks and periods.


def quick_bytes(plan: Plan, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], workers: int) -> float:
    """Return what `sent_bytes` returns. Plans of codecs that have no formula here are run as there."""
    schedule, sent = plan.schedule, 0.0
    if not isinstance(schedule, Every | Streaming) or plan.topology.inner is not None or not _has_formula(plan.codec):
        return _sent(plan, tensors, buffers, workers)
    if plan.needs_anchor:
        tensors = {name: t.to(wide_dtype(t.dtype)) for name, t in tensors.items()}
    for names in in_parts(tensors, schedule.fragments) if schedule.fragments > 1 else [list(tensors)]:
        for bucket in bucketed({name: tensors[name] for name in names}):
            sent += _codec_bytes(plan.codec, bucket, workers)
    if plan.local and plan.buffers != "keep":
        op = "all_reduce" if plan.buffers == "average" else "broadcast"
        chosen = [b for b in buffers.values() if b.is_floating_point() or op == "broadcast"]
        sent += wire_bytes(op, sum(b.nbytes for b in chosen), workers)
    return sent / schedule.period


def _has_formula(codec: Codec) -> bool:
    if isinstance(codec, ErrorFeedback):
        return _has_formula(codec.codec)
    if isinstance(codec, ByShape):
        return _has_formula(codec.codec) and _has_formula(codec.rest)
    return isinstance(codec, Exact | Quantized) or (isinstance(codec, LowRank) and codec.rounds == "two")


def _codec_bytes(codec: Codec, tensors: Mapping[str, Tensor], workers: int) -> int:
    """Return what one worker sends to average tensors once, through a codec that has a formula."""
    if isinstance(codec, ErrorFeedback):
        return _codec_bytes(codec.codec, tensors, workers)
    if isinstance(codec, ByShape):
        taken = {name: t for name, t in tensors.items() if codec.codec.accepts(t.shape)}
        rest = {name: t for name, t in tensors.items() if name not in taken}
        return _codec_bytes(codec.codec, taken, workers) + _codec_bytes(codec.rest, rest, workers)
    numels = {name: t.numel() for name, t in tensors.items()}
    if isinstance(codec, Quantized):
        return _in_blocks(codec, numels, workers)
    if isinstance(codec, LowRank):
        sides = {name: (t.shape[0], t.shape[1:].numel()) for name, t in tensors.items()}
        ranks = {name: min(codec.rank, *shape) for name, shape in sides.items()}
        factors = [{name: ranks[name] * sides[name][side] for name in sides} for side in (0, 1)]
        if codec.bits is not None:
            return sum(_in_blocks(codec.of_factors, each, workers) for each in factors)
        wide = {name: wide_dtype(t.dtype).itemsize for name, t in tensors.items()}
        sizes = [sum(n * wide[name] for name, n in each.items()) for each in factors]
    else:
        sizes = [sum(numels[name] * t.element_size() for name, t in tensors.items())]
    return sum(wire_bytes("all_reduce", size, workers) for size in sizes)


def _in_blocks(codec: Quantized, numels: Mapping[str, int], workers: int) -> int:
    return bytes_in_shards(codec.block, width(codec.block, codec.bits), numels, workers)
