"""The bytes that a plan sends, computed without running it.

What each codec sends follows from the shapes by a rule (`_messages`). Codecs that have no rule here run on meta tensors
instead (`comm/dry.py`), and tests compare the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import TypeAlias

import torch
from torch import Tensor, nn

from laconic.codecs import ByName, ByShape, Cast, Codec, ErrorFeedback, Exact, LowRank, Quantized, TopK
from laconic.codecs.routing import routed
from laconic.comm.averaging import pieces
from laconic.comm.dry import dry
from laconic.exchange import Averaged, Exchange, Level, Peers, State, check_sizes
from laconic.ledger import Entry, Ledger, crossing_bytes
from laconic.packing import bucketed, in_buckets, in_fragments, shift_of, sizes_of, wide_dtype
from laconic.plans.plan import Plan
from laconic.plans.schedules import Every, Payload, Streaming, Sync
from laconic.plans.targets import Kind, ModelFacts
from laconic.plans.topology import World
from laconic.values import is_whole

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
    machine: int | None = None,
) -> float:
    """Return the bytes that one worker sends at one step, without communication.

    Where steps differ, because of a period or of alternating rounds, the result is the average over steps from `start`
    on. Shapes count as float32.
    `buffers`, by default those of a module, are sent with each round of weights as the plan says. Those that a DDP
    model broadcasts at each step of gradients, as DDP does, are not counted. `machine` is the number of workers of one
    machine, for plans that group these.

    >>> from laconic import ddp, frugal, power_sgd
    >>> sent_bytes(ddp(), {"weight": (512, 512)}), sent_bytes(power_sgd(rank=4), {"weight": (512, 512)})
    (1048576.0, 2112.0)
    >>> sent_bytes(frugal("60x"), {"weight": (512, 512)}) <= sent_bytes(ddp(), {"weight": (512, 512)}) / 60
    True
    """
    if workers < 1 or workers != int(workers):
        raise ValueError(f"sent_bytes(workers={workers!r}): workers must be a whole number of at least 1.")
    if machine is not None and (not is_whole(machine) or workers % machine):
        raise ValueError(
            f"sent_bytes(workers={workers!r}, machine={machine!r}): machine must be the number of workers of each "
            "machine, which divides workers, such as workers=8, machine=4. Leave it out for plans without groups."
        )
    check_sizes([size_of(level, workers, machine) for level in plan.levels], workers)
    facts = facts_of(named_tensors, workers, buffers, machine=machine)
    plan = plan.resolved(facts)
    sent = planned(plan, facts.tensors, workers, machine=machine, buffers=facts.buffers)
    return sum(each.wire_bytes for one in sent for each in one.collectives) / cycle_of(plan)


def facts_of(
    named: Named,
    workers: int,
    buffers: Named | None = None,
    optimizers: Sequence[Kind] = ("adaptive",),
    machine: int | None = None,
) -> ModelFacts:
    """Return what a target of bytes is resolved from; one worker, which others may join, counts as two.

    Of a plan with groups, what crosses the link of a group counts, and not what is sent inside.
    """
    if buffers is None:
        buffers = dict(named.named_buffers()) if isinstance(named, nn.Module) else {}
    tensors, held, workers = meta(named), meta(buffers), max(2, workers)

    def count(plan: Plan) -> float:
        inner, outermost = plan.topology.inner, replace(plan, topology=World())
        sent = [each for one in planned(outermost, tensors, workers, buffers=held) for each in one.collectives]
        if inner is None:
            return sum(each.wire_bytes for each in sent) / cycle_of(plan)
        size = size_of(inner, workers, machine)
        return sum(crossing_bytes(each.op, each.payload_bytes, workers, size) for each in sent) / cycle_of(plan)

    return ModelFacts(tensors, held, tuple(optimizers), workers, count)


def cycle_of(plan: Plan) -> int:
    """Return the steps after which what is sent repeats: two periods, as alternating rounds then send both factors."""
    plan.check_by_steps("A forecast")
    return 2 * plan.schedule.period


def planned(
    plan: Plan,
    tensors: Mapping[str, Tensor],
    workers: int,
    buckets: Buckets = in_buckets,
    machine: int | None = None,
    state: State | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    by_rule: bool = True,
) -> Iterator[Planned]:
    """List what one worker sends in `cycle_of(plan)` steps from `start` on.

    Messages follow from the rules of codecs that have one; other codecs, and with `by_rule=False` all, run on meta
    tensors. `machine` is the number of workers of one machine, for plans that group these. `state` is filled with what
    a codec keeps that runs. `buffers` are those of the model, which rounds of weights send, too.
    """
    if plan.needs_anchor:  # deltas are fp32 or fp64
        tensors = widened(tensors)
    states: State = {} if state is None else state
    fragments = in_fragments(tensors, plan.schedule.fragments)
    known: dict[tuple[Sync, int], list[tuple[tuple[str, ...], tuple[Entry, ...]]]] = {}
    turns: Counter[Sync] = Counter()
    for step in _steps(plan):
        for sync in plan.syncs_at(step):
            size = size_of(sync.level, workers, machine)
            turn = turns[sync] % 2  # alternating rounds send both factors in turn
            turns[sync] += 1
            codec = routed(plan.codec_of(sync, step))
            found = known.get((sync, turn))
            if found is None:
                chosen, found = tensors, []
                if sync.fragment is not None:
                    chosen = {name: tensors[name] for name in fragments[sync.fragment]}
                for names in buckets(chosen) if size > 1 else ():
                    bucket = {name: chosen[name] for name in names}
                    if by_rule and has_rule(codec):
                        entries = _entries(_messages(codec, bucket, size, turn), size)
                    else:
                        own = states.setdefault(sync.payload, {})
                        entries = _counted(codec.average(bucket, own, Peers(0, size)), size)
                    found.append((tuple(names), entries))
                found += [((), _entries([each], size)) for each in _of_buffers(plan, sync, buffers or {}, size)]
                if by_rule:
                    known[sync, turn] = found
            for names, entries in found:
                yield Planned(step, sync, names, entries)


def _steps(plan: Plan) -> Iterable[int]:
    """Return the steps of a cycle, of a long period only those at which something is sent."""
    schedule = plan.schedule
    start, period = schedule.start, schedule.period
    if plan.topology.inner is not None or not isinstance(schedule, Every | Streaming):
        return range(start, start + cycle_of(plan))
    places = [fragment * period // schedule.fragments or period for fragment in range(schedule.fragments)]
    return sorted(start - 1 + place + turn * period for place in places for turn in (0, 1))


def _entries(messages: Iterable[_Message], workers: int) -> tuple[Entry, ...]:
    ledger = Ledger()
    for round_, each in enumerate(messages, 1):
        ledger.record(each.op, each.payload_bytes, workers, phase="plan", round_=round_, own=each.own)
    return tuple(ledger.entries)


def _counted(exchange: Exchange[Averaged], workers: int) -> tuple[Entry, ...]:
    ledger = Ledger()
    dry(exchange, ledger, workers)
    return tuple(ledger.entries)


def _of_buffers(plan: Plan, sync: Sync, buffers: Mapping[str, Tensor], workers: int) -> Iterator[_Message]:
    """Yield what is sent of buffers in a round of weights, with its first fragment: see `WeightSync.sync`."""
    if sync.payload is not Payload.WEIGHTS or sync.fragment or workers == 1:
        return
    if plan.buffers == "average":
        for piece, _ in pieces({name: b for name, b in buffers.items() if b.is_floating_point()}, workers):
            yield _whole("all_reduce", piece)
    elif plan.buffers == "leader":
        yield from (_whole("broadcast", bucket) for bucket in bucketed(buffers))


def _whole(op: str, tensors: Mapping[str, Tensor]) -> _Message:
    return _Message(op, next(iter(tensors.values())).dtype, sum(t.nbytes for t in tensors.values()))


def size_of(level: Level, workers: int, machine: int | None) -> int:
    """Return how many workers are in a group of a level, where so many are on one machine."""
    if level == "machine":
        if machine is None:
            raise ValueError("a plan with groups of one machine: tell how many workers a machine has, as in machine=4.")
        return machine
    return workers if level is None else level


def meta(named: Named) -> dict[str, Tensor]:
    """Return tensors of these shapes without memory."""
    if isinstance(named, nn.Module):
        named = ((name, p) for name, p in named.named_parameters() if p.requires_grad)
    pairs = named.items() if isinstance(named, Mapping) else named
    return {name: _empty(x.shape, x.dtype) if isinstance(x, Tensor) else _empty(x) for name, x in pairs}


def _empty(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


# The rules: what codecs send, without running them, which takes seconds on large models.


@dataclass(frozen=True)
class _Message:
    """What one worker passes to a collective, and how much of an all_to_all stays with it.

    Messages of one operation and dtype that are sent in one round are joined.
    """

    op: str
    dtype: torch.dtype
    payload_bytes: int
    own: int | None = None
    joins: bool = True

    def with_(self, other: _Message) -> _Message:
        """Return both as one message."""
        own = None if self.own is None or other.own is None else self.own + other.own
        return replace(self, payload_bytes=self.payload_bytes + other.payload_bytes, own=own)


def has_rule(codec: Codec) -> bool:
    """Return whether `_messages` and `kept_bytes` know a codec; of others they know nothing."""
    if isinstance(codec, ErrorFeedback):
        return has_rule(codec.codec)
    if isinstance(codec, ByShape | ByName):
        return all(has_rule(each) for _, each, _ in codec.parts({}))
    return type(codec) in (Exact, Cast, Quantized, TopK, LowRank)


def _messages(codec: Codec, tensors: Mapping[str, Tensor], workers: int, turn: int) -> list[_Message]:
    """Return what one worker sends to average tensors once, in order; `turn` counts the times before this one."""
    if isinstance(codec, ErrorFeedback):
        return _messages(codec.codec, widened(tensors), workers, turn)
    if isinstance(codec, ByShape | ByName):
        return _joined([_messages(each, some, workers, turn) for _, each, some in codec.parts(tensors) if some])
    numels = {name: t.numel() for name, t in tensors.items()}
    if isinstance(codec, Quantized | TopK):
        return _in_shards(codec, numels, workers)
    dtype = next(iter(tensors.values())).dtype
    if isinstance(codec, LowRank):
        dtype, found = wide_dtype(dtype), list[_Message]()
        for side in (0, 1) if codec.rounds == "two" else (turn % 2,):
            factor = {name: _rank(codec, t) * _sides(t)[side] for name, t in tensors.items()}
            sharded = codec.bits is not None
            found += _in_shards(codec.of_factors, factor, workers) if sharded else _mean(factor, dtype)
        return found
    if isinstance(codec, Cast):
        return _mean(numels, codec.dtype)
    return _mean(numels, dtype, joins=isinstance(codec, Exact) and not codec.wide)


def _joined(parts: Sequence[Sequence[_Message]]) -> list[_Message]:
    """Join what parts of the tensors send in the same rounds, as `average_parts` does."""
    found: list[_Message] = []
    for messages in zip_longest(*parts):
        groups: dict[object, _Message] = {}
        for index, each in enumerate(messages):
            if each is not None:
                key = (each.op, each.dtype) if each.joins else index
                groups[key] = groups[key].with_(each) if key in groups else each
        found += groups.values()
    return found


def _mean(numels: Mapping[str, int], dtype: torch.dtype, joins: bool = True) -> list[_Message]:
    payload = sum(numels.values()) * dtype.itemsize
    return [_Message("all_reduce", dtype, payload, joins=joins)] if payload else []


def _in_shards(codec: Quantized | TopK, numels: Mapping[str, int], workers: int) -> list[_Message]:
    """Return what `reduce_in_shards` sends: all rows to their owners, and the owners' means to all."""
    rows = {name: -(-numel // codec.row) for name, numel in numels.items() if numel}
    if not rows:
        return []
    first, most = _owned(tuple((count, shift_of(name, workers)) for name, count in rows.items()), workers)
    size = _message_bytes(codec)
    return [
        _Message("all_to_all", torch.uint8, sum(rows.values()) * size, first * size),
        _Message("all_gather", torch.uint8, most * size),
    ]


@lru_cache(maxsize=4096)  # models have many tensors of one shape
def _owned(placed: tuple[tuple[int, int], ...], workers: int) -> tuple[int, int]:
    """Return how many rows the first worker owns, and the most that any does."""
    sizes = sizes_of(placed, workers)
    return int(sizes[0]), int(sizes.max())


@lru_cache(maxsize=256)
def _message_bytes(codec: Quantized | TopK) -> int:
    """Return the bytes of an encoded row."""
    return codec.encode(torch.zeros(1, codec.row), None, None).shape[1]


def _sides(t: Tensor) -> tuple[int, int]:
    return t.shape[0], t.shape[1:].numel()


def _rank(codec: LowRank, t: Tensor) -> int:
    return min(codec.rank, *_sides(t))


def widened(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the dtype that deltas and residuals have."""
    return {name: t.to(wide_dtype(t.dtype)) for name, t in tensors.items()}


def kept_bytes(codec: Codec, tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of the tensors in the state of a codec that has a rule."""
    if isinstance(codec, ErrorFeedback):
        wide = widened(tensors)
        return sum(t.nbytes for t in wide.values()) + kept_bytes(codec.codec, wide)
    if isinstance(codec, ByShape | ByName):
        return sum(kept_bytes(each, some) for _, each, some in codec.parts(tensors))
    if isinstance(codec, LowRank) and codec.warm_start:
        return sum(_rank(codec, t) * sum(_sides(t)) * wide_dtype(t.dtype).itemsize for t in tensors.values())
    return 0


def tensor_bytes(tree: object) -> int:
    """Count the bytes of all tensors in a tree of dicts, such as the state of a codec, without caches."""
    if isinstance(tree, Tensor):
        return tree.nbytes
    if isinstance(tree, dict):
        return sum(tensor_bytes(value) for key, value in tree.items() if not str(key).startswith("_"))
    if isinstance(tree, list | tuple):
        return sum(tensor_bytes(value) for value in tree)
    return 0
