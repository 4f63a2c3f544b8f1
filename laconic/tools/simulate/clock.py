"""The virtual clock: each worker's own time, which collectives bring together.

`VirtualClock` is that of a simulated training. `TimeOnly` trains nothing, for up to hundreds of thousands of workers:
what is sent, and when it is released, is that of `laconic plan` (`planner/predict.py`). Each step is a few operations
on one vector, the time of every worker.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from laconic import Plan, ddp
from laconic.plans.schedules import Payload
from laconic.tools.errors import UsageError
from laconic.tools.launch.links import Level, Link
from laconic.tools.planner.network import ComputedNetwork, Message, Network, released_s
from laconic.tools.planner.predict import Prediction, Scenario, Transfer
from laconic.tools.planner.shapes import Shapes
from laconic.tools.simulate.in_process import Collective, Members
from laconic.values import is_number

NO_TIME = ComputedNetwork(Link((Level(1, inf),)))
"""A network on which sending takes no time."""


@dataclass(frozen=True)
class Conditions:
    """How long computing and sending takes.

    `step_s` is what a step computes for. `jitter` is its standard deviation, relative to it, drawn for each worker and
    step.
    """

    step_s: float = 0.05
    jitter: float = 0.0
    network: Network = NO_TIME
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_number(self.jitter) or self.jitter < 0:
            raise UsageError(f"--jitter {self.jitter:g}: it must not be negative. Write --jitter 0.1 for 10 %.")


def arrival(ready: Tensor, free: Tensor, queued: Sequence[Message], step_s: float) -> Tensor:
    """Return when messages have arrived that go one after another, in seconds of each group of workers.

    `ready` is when the slowest worker of a group ends its step, of `step_s`; `free` when its link has sent what was
    before.

    >>> early, late = Message(release_s=0.75, seconds=0.5), Message(release_s=1.0, seconds=0.5)
    >>> arrival(torch.tensor(1.0), torch.tensor(0.0), [early, late], step_s=1.0)
    tensor(1.7500)
    """
    for each in queued:
        free = torch.maximum(free, ready - step_s + each.release_s) + each.seconds
    return free


@dataclass(frozen=True)
class TimeUse:
    """What the seconds of all workers were used for, as shares of 1.

    `stragglers` is waiting for slower workers, `link` waiting for what is sent, `faults` what was undone.
    """

    computing: float
    stragglers: float
    link: float
    faults: float

    @staticmethod
    def of(computing_s: float, stragglers_s: float, link_s: float, faults_s: float = 0.0) -> TimeUse:
        """Make shares of seconds."""
        each = (computing_s, stragglers_s, link_s, faults_s)
        return TimeUse(*(s / (sum(each) or 1.0) for s in each))


@dataclass(frozen=True)
class SimulatedStep:
    """One step of all workers: the loss of each, the latest virtual time, and what the first has sent so far."""

    step: int
    losses: tuple[float, ...]
    seconds: float
    sent_bytes: int

    @property
    def loss(self) -> float:
        """The mean of the workers' losses."""
        return fmean(self.losses)


@dataclass(frozen=True)
class SimulatedOutcome:
    """What a run took and sent; of a training also its losses, and its steps without those that faults have undone."""

    plan: str
    workers: int
    parameters: int
    steps: int
    seconds: float
    sent_bytes: float
    """What worker 0, or the first that is left, has sent."""
    use: TimeUse
    left: int
    """The workers that were not lost."""
    level_bytes: dict[str, int] = field(default_factory=dict)
    """`sent_bytes` of a training by level."""
    curve: tuple[SimulatedStep, ...] = ()
    validation_loss: float | None = None

    @property
    def step_s(self) -> float:
        """The mean virtual seconds of a step."""
        return self.seconds / self.steps

    def as_json(self) -> dict[str, Any]:
        """Return what is written of it as JSON."""
        curve = [asdict(each) | {"loss": each.loss} for each in self.curve]
        loss = self.curve[-1].loss if self.curve else None
        more = {"loss": loss, "step_s": self.step_s, "utilisation": self.use.computing}
        return asdict(self) | more | {"curve": curve}


class VirtualClock:
    """Counts virtual seconds of all workers.

    Gradients of a DDP model (`overlap`) are sent during the backward pass, bucket by bucket, from the last layer down,
    in one queue. Deltas of a plan with a `delay` are sent while the next steps compute. All else is waited for.
    """

    def __init__(self, workers: int, conditions: Conditions, overlap: bool, delay: int = 0) -> None:
        self.now = [0.0] * workers
        self._computed: list[dict[int, float]] = [{} for _ in range(workers)]
        """The seconds of each step that was not undone, by worker."""
        self._straggling_s = self._link_s = 0.0
        self._conditions = conditions
        self._overlap = overlap
        self._delay = delay
        self._free = 0.0
        """When the link has sent everything."""
        self._due: dict[int, float] = {}
        """When what is due after a step has arrived."""
        self._lock = threading.Lock()

    def compute(self, worker: int, step: int) -> None:
        """Let a worker compute one step. The time is the same whenever threads take their turns."""
        given = self._conditions
        drawn = random.Random(f"{given.seed}/{worker}/{step}").gauss(1.0, given.jitter)
        taken_s = max(0.0, drawn) * given.step_s
        with self._lock:
            self.now[worker] += taken_s
            self._computed[worker][step] = taken_s

    def served(self, members: Members, sent: list[Collective]) -> None:
        """Let collectives of these workers take their time."""
        queued = self._messages(sent, len(members))
        with self._lock:
            ready = max(self.now[worker] for worker in members)
            self._free = float(arrival(_seconds(ready), _seconds(self._free), queued, self._conditions.step_s))
            if self._delay and sent[0].phase == Payload.WEIGHTS:
                self._due[sent[0].step + self._delay] = self._free
                return
            end = max(ready, self._free)  # all wait for the slowest worker, and then for the link
            self._link_s += len(members) * (end - ready)
            for worker in members:
                self._straggling_s += ready - self.now[worker]
                self.now[worker] = end

    def _messages(self, sent: list[Collective], workers: int) -> list[Message]:
        step_s, total, done = self._conditions.step_s, sum(each.payload_bytes for each in sent) or 1, 0
        found = []
        for each in sent:
            done += each.payload_bytes
            early = self._overlap and each.phase == Payload.GRADIENT
            release_s = released_s(done / total, step_s) if early else step_s
            found.append(Message(release_s, self._conditions.network.seconds(each.op, each.payload_bytes, workers)))
        return found

    def after_step(self, worker: int, step: int) -> None:
        """Let a worker wait for what is due after a step."""
        with self._lock:
            arrived = self._due.get(step, 0.0)
            self._link_s += max(0.0, arrived - self.now[worker])
            self.now[worker] = max(self.now[worker], arrived)

    def rewind(self, members: Members, step: int) -> None:
        """Undo all steps after `step`, which costs the time that they took."""
        with self._lock:
            self._due.clear()
            latest = max(self.now[worker] for worker in members)
            for worker in members:
                self.now[worker] = latest
            self._computed = [{at: s for at, s in each.items() if at <= step} for each in self._computed]

    def use(self) -> TimeUse:
        """Return what the time so far was used for."""
        with self._lock:
            computed_s = sum(sum(each.values()) for each in self._computed)
            rest = sum(self.now) - computed_s - self._straggling_s - self._link_s
            return TimeUse.of(computed_s, self._straggling_s, self._link_s, max(0.0, rest))


class TimeOnly:
    """Simulates the time of a run."""

    def __init__(
        self, plan: Plan, shapes: Shapes, workers: int, conditions: Conditions, machine: int | None = None
    ) -> None:
        self.plan, self.workers, self._given = plan, workers, conditions
        scenario = Scenario(shapes, workers, conditions.network, conditions.step_s, machine=machine)
        self._prediction = Prediction(plan, scenario)
        start = self._prediction.resolved.schedule.start
        self._warm_up = Prediction(ddp(), scenario) if start > 1 else self._prediction
        for size in {each.workers for each in self._prediction.sent if workers % each.workers}:
            raise UsageError(
                f"{plan!r}: it has groups of {size}, and {workers} workers cannot be divided so. Choose a --workers "
                f"that {size} divides."
            )
        self._draw = torch.Generator().manual_seed(conditions.seed)
        self._now = torch.zeros(workers, dtype=torch.float64)
        """The time of each worker."""
        self._free = torch.zeros(workers, dtype=torch.float64)
        """When the link of each worker has sent everything."""
        self._due: dict[int, torch.Tensor] = {}
        """When what is due after a step has arrived at each worker."""
        self._computed_s = self._straggling_s = self._link_s = 0.0

    def run(self, steps: int) -> SimulatedOutcome:
        """Simulate so many steps."""
        sent_bytes = 0.0
        for step in range(1, steps + 1):
            self._compute()
            if step in self._due:
                late = (self._due.pop(step) - self._now).clamp_(min=0)
                self._link_s += float(late.sum())
                self._now += late
            sent = self._sent_at(step)
            for size, delay in dict.fromkeys((each.workers, each.delay) for each in sent):
                self._send([each for each in sent if (each.workers, each.delay) == (size, delay)], step)
            sent_bytes += sum(each.wire_bytes for each in sent)
        use = TimeUse.of(self._computed_s, self._straggling_s, self._link_s)
        seconds, numbers = float(self._now.max()), self._prediction.scenario.shapes.parameters
        return SimulatedOutcome(repr(self.plan), self.workers, numbers, steps, seconds, sent_bytes, use, self.workers)

    def _sent_at(self, step: int) -> list[Transfer]:
        place = step - self._prediction.resolved.schedule.start
        found = self._prediction if place >= 0 else self._warm_up
        return [each for each in found.sent if each.step == place % found.cycle]

    def _compute(self) -> None:
        taken = torch.full_like(self._now, self._given.step_s)
        if self._given.jitter:
            drawn = torch.randn(self.workers, generator=self._draw)
            taken *= drawn.mul_(self._given.jitter).add_(1).clamp_(min=0)
        self._now += taken
        self._computed_s += float(taken.sum())

    def _send(self, sent: Sequence[Transfer], step: int) -> None:
        """Let groups of neighbours wait for their slowest worker, and send; what has a delay is not waited for."""
        size, delay, step_s = sent[0].workers, sent[0].delay, self._given.step_s
        queued = sorted(
            (Message(each.released_s(step_s), each.seconds(self._given.network)) for each in sent),
            key=lambda message: message.release_s,
        )
        now, free = self._now.view(-1, size), self._free.view(-1, size)  # [groups, workers of a group]
        ready = now.amax(1, keepdim=True)
        arrived = arrival(ready, free.amax(1, keepdim=True), queued, step_s)
        free.copy_(arrived.expand_as(free))
        if delay:
            self._due[step + delay] = self._free.clone()
            return
        end = torch.maximum(ready, arrived)
        self._straggling_s += float((ready - now).sum())
        self._link_s += float((end - ready).sum()) * size
        now.copy_(end.expand_as(now))


def _seconds(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
