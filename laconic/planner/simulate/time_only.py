"""The virtual clock alone: no training, up to hundreds of thousands of workers.

The codecs run once on meta tensors, to know what is sent. Then each step is a few operations on one vector, the time of
every worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laconic import Plan
from laconic.codecs.contract import wide_dtype
from laconic.codecs.packing import in_buckets, in_parts
from laconic.comm.dry import dry
from laconic.comm.requests import State
from laconic.compare.settings import LabError
from laconic.cost import routed
from laconic.ledger import Ledger
from laconic.planner.simulate.clock import TimeUse, arrival, messages
from laconic.planner.simulate.timing import Timing
from laconic.plans.schedules import Level, Payload, Streaming, Sync, SyncClock

ATTEMPTS = 10_000
"""How often a round may be lost to faults, one after the other, before the simulation gives up."""


@dataclass(frozen=True)
class TimeOutcome:
    """The virtual seconds of a run, what they were used for, and what one worker sent."""

    plan: str
    workers: int
    steps: int
    seconds: float
    sent_bytes: int
    faults: int
    use: TimeUse

    @property
    def step_s(self) -> float:
        """The mean seconds of a step."""
        return self.seconds / self.steps


@dataclass(eq=False)
class Sends:
    """What one worker sends at a sync, from a dry run of the codec: the first two syncs of a kind, which then repeat.

    They differ where rounds alternate.
    """

    plan: Plan
    tensors: Mapping[str, Tensor]
    workers: int
    ledger: Ledger = field(default_factory=lambda: Ledger(keep=0))
    _state: State = field(default_factory=dict)
    _known: dict[tuple[Sync, bool, int], list[tuple[str, int, int]]] = field(default_factory=dict)
    _count: dict[tuple[Sync, bool], int] = field(default_factory=dict)

    def at(self, sync: Sync, step: int, members: int) -> list[tuple[str, int, int]]:
        """Return the collectives of a sync: operation, bytes passed to it, and bytes that one worker sends."""
        kind = (sync, step < self.plan.schedule.start)
        count = self._count[kind] = self._count.get(kind, 0) + 1
        key = (*kind, count % 2)
        if key not in self._known:
            self._known[key] = self._dry(sync, step, members)
        return self._known[key]

    def _dry(self, sync: Sync, step: int, members: int) -> list[tuple[str, int, int]]:
        plan, chosen = self.plan, dict(self.tensors)
        if sync.part is not None:
            chosen = {name: chosen[name] for name in in_parts(chosen, plan.schedule.fragments)[sync.part]}
        if plan.needs_anchor and sync.payload is Payload.WEIGHTS:  # deltas are fp32 or fp64
            chosen = {name: t.to(wide_dtype(t.dtype)) for name, t in chosen.items()}
        ledger, codec = Ledger(), routed(plan.codec_of(sync, step))
        for bucket in reversed(in_buckets(chosen)):  # gradients of the last layers are ready first
            dry(codec.average({name: chosen[name] for name in bucket}, self._state), ledger, members)
        return [(entry.op, entry.payload_bytes, entry.wire_bytes) for entry in ledger.entries]


@dataclass(eq=False)
class TimeOnly:
    """Simulates the time of a run.

    `mtbf_s` is the mean time between failures of one worker. A failure loses the round that it falls into, for all
    workers, and `restart_s` besides; then another worker takes its place.
    """

    plan: Plan
    tensors: Mapping[str, Tensor]
    workers: int
    timing: Timing = Timing()
    mtbf_s: float | None = None
    restart_s: float = 0.0

    def run(self, steps: int) -> TimeOutcome:
        """Simulate so many steps."""
        self._draw = torch.Generator().manual_seed(self.timing.seed)
        self._now = torch.zeros(self.workers, dtype=torch.float64)
        self._free = torch.zeros(self.workers, dtype=torch.float64)
        self._slower = torch.ones(self.workers, dtype=torch.float64)
        self._slower[: self.timing.stragglers.count] = self.timing.stragglers.times
        self._computed_s = self._straggling_s = self._link_s = 0.0
        self._committed_s, self._faults, self._lost_s = 0.0, 0, 0.0
        self._due: dict[int, Tensor] = {}
        sends, sent_bytes = Sends(self.plan, self.tensors, self.workers), 0
        clock = SyncClock(since=self.plan.schedule.start - 1)
        for step in range(1, steps + 1):
            self._compute()
            self._settle(step)
            for sync in self.plan.syncs_at(step, clock):
                members = self._members(sync.level)
                sent = sends.at(sync, step, members) if members > 1 else []
                sent_bytes += sum(wire for _, _, wire in sent)
                self._sync(sync, step, members, [(op, size) for op, size, _ in sent])
                if self.plan.is_outermost(sync):
                    self._commit()
                    clock = SyncClock(step) if sync.payload is Payload.WEIGHTS and sync.part is None else clock
        use = TimeUse.of(self._computed_s, self._straggling_s, self._link_s, self._lost_s * self.workers)
        end = float(self._now.max())
        return TimeOutcome(repr(self.plan), self.workers, steps, end, sent_bytes, self._faults, use)

    def _compute(self) -> None:
        timing = self.timing
        taken = self._slower * timing.step_s
        if timing.jitter:
            drawn = torch.randn(self.workers, generator=self._draw, dtype=torch.float32)
            taken = taken * drawn.mul_(timing.jitter).add_(1).clamp_(min=0)
        self._now += taken
        self._computed_s += float(taken.sum())

    def _settle(self, step: int) -> None:
        """Wait for the fragment that is due after this step."""
        if step in self._due:
            late = (self._due.pop(step) - self._now).clamp_(min=0)
            self._link_s += float(late.sum())
            self._now += late

    def _sync(self, sync: Sync, step: int, members: int, sent: list[tuple[str, int]]) -> None:
        """Let groups of `members` neighbours meet, and send."""
        schedule = self.plan.schedule
        delay = schedule.delay if isinstance(schedule, Streaming) and sync.payload is Payload.WEIGHTS else 0
        queued = messages(sent, members, self.timing, early=sync.payload is Payload.GRADIENT)
        now, free = self._now.view(-1, members), self._free.view(-1, members)
        ready = now.amax(1, keepdim=True)
        arrived = arrival(ready, free.amax(1, keepdim=True), queued)
        free.copy_(arrived.expand_as(free))
        if delay:
            self._due[step + delay] = free.flatten().clone()
            return
        end = torch.maximum(ready, arrived)
        self._straggling_s += float((ready - now).sum())
        self._link_s += float((end - ready).sum()) * members
        now.copy_(end.expand_as(now))

    def _commit(self) -> None:
        """End a round: faults that fall into it lose it, and it is done again."""
        now = float(self._now.max())
        if self.mtbf_s:
            lost_s = sum(self._losses(now - self._committed_s))
            self._lost_s += lost_s
            self._now += lost_s
            now += lost_s
        self._committed_s = now

    def _losses(self, round_s: float) -> Iterator[float]:
        """Yield the seconds that are lost to each fault before a round is done."""
        assert self.mtbf_s is not None
        between_s = self.mtbf_s / self.workers
        for _ in range(ATTEMPTS):
            until = float(torch.empty(1, dtype=torch.float64).exponential_(1 / between_s, generator=self._draw))
            if until >= round_s:
                return
            self._faults += 1
            yield until + self.restart_s
        raise LabError(
            f"--mtbf: among {self.workers} workers one fails every {between_s:.3g} s, and a round takes {round_s:.3g} "
            "s: none is ever done. Use a shorter period, or more reliable workers."
        )

    def _members(self, level: Level) -> int:
        if level is None:
            return self.workers
        link = self.timing.link
        size = level if isinstance(level, int) else self.workers if link is None else link.levels[0].count
        if self.workers % size:
            raise LabError(
                f"{self.plan!r}: it has groups of {size}, and {self.workers} workers cannot be divided so. Choose a "
                f"--workers that {size} divides."
            )
        return size
