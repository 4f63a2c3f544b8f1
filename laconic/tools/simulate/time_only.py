"""The virtual clock alone: no training, up to hundreds of thousands of workers.

What is sent, and when it is released, is that of `laconic plan` (`predict.py`). Each step is a few operations on one
vector, the time of every worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from laconic import Plan, ddp
from laconic.tools.errors import UsageError
from laconic.tools.launch.links import Link
from laconic.tools.planner.collectives import Formula
from laconic.tools.planner.predict import Prediction, Scenario
from laconic.tools.planner.sent import Sent
from laconic.tools.planner.shapes import Shapes
from laconic.tools.planner.timeline import Message, released_s
from laconic.tools.simulate.clock import TimeUse, arrival
from laconic.tools.simulate.conditions import Conditions

ATTEMPTS = 10_000
"""How often a round may be lost to faults, one after the other, before the simulation gives up."""


@dataclass(frozen=True)
class TimeOutcome:
    """The virtual seconds of a run, what they were used for, and what one worker sent."""

    plan: str
    workers: int
    steps: int
    seconds: float
    sent_bytes: float
    faults: int
    use: TimeUse

    @property
    def step_s(self) -> float:
        """The mean seconds of a step."""
        return self.seconds / self.steps


class TimeOnly:
    """Simulates the time of a run.

    `mtbf_s` is the mean time between faults of the whole run. A fault loses the round that it falls into, for all
    workers, and `restart_s` besides; then another worker takes the place of the one that was lost.
    """

    def __init__(
        self,
        plan: Plan,
        shapes: Shapes,
        workers: int,
        conditions: Conditions,
        mtbf_s: float | None = None,
        restart_s: float = 0.0,
        machine: int | None = None,
    ) -> None:
        self.plan, self.workers = plan, workers
        self._given, self._mtbf_s, self._restart_s = conditions, mtbf_s, restart_s
        network = conditions.network or Formula(Link(()))  # of no use where sending takes no time
        scenario = Scenario(shapes, workers, network, conditions.step_s, machine=machine)
        self._prediction = Prediction(plan, scenario)
        self._warm_up = Prediction(ddp(), scenario) if plan.schedule.start > 1 else self._prediction
        for size in {each.workers for each in self._prediction.sent if workers % each.workers}:
            raise UsageError(
                f"{plan!r}: it has groups of {size}, and {workers} workers cannot be divided so. Choose a --workers "
                f"that {size} divides."
            )
        self._draw = torch.Generator().manual_seed(conditions.seed)
        self._now = torch.zeros(workers, dtype=torch.float64)
        self._free = torch.zeros(workers, dtype=torch.float64)
        """When the link of each worker has sent everything."""
        self._due: dict[int, torch.Tensor] = {}
        self._slower = torch.ones(workers, dtype=torch.float64)
        self._slower[: conditions.stragglers.count] = conditions.stragglers.times
        self._computed_s = self._straggling_s = self._link_s = self._lost_s = self._committed_s = 0.0
        self._faults = 0

    def run(self, steps: int) -> TimeOutcome:
        """Simulate so many steps."""
        sent_bytes = 0.0
        for step in range(1, steps + 1):
            self._compute()
            self._settle(step)
            sent = self._sent_at(step)
            for size, delay in dict.fromkeys((each.workers, each.delay) for each in sent):
                together = [each for each in sent if (each.workers, each.delay) == (size, delay)]
                self._send(together, step)
                sent_bytes += sum(wire for each in together for _, _, wire in each.collectives)
            if any(each.workers == self.workers for each in sent):
                self._commit()
        use = TimeUse.of(self._computed_s, self._straggling_s, self._link_s, self._lost_s * self.workers)
        end_s = float(self._now.max())
        return TimeOutcome(repr(self.plan), self.workers, steps, end_s, sent_bytes, self._faults, use)

    def _sent_at(self, step: int) -> list[Sent]:
        place = step - self.plan.schedule.start
        found = self._prediction if place >= 0 else self._warm_up
        return [each for each in found.sent if each.step == place % found.cycle]

    def _compute(self) -> None:
        taken = self._slower * self._given.step_s
        if self._given.jitter:
            drawn = torch.randn(self.workers, generator=self._draw)
            taken *= drawn.mul_(self._given.jitter).add_(1).clamp_(min=0)
        self._now += taken
        self._computed_s += float(taken.sum())

    def _settle(self, step: int) -> None:
        """Wait for what is due after this step."""
        if step in self._due:
            late = (self._due.pop(step) - self._now).clamp_(min=0)
            self._link_s += float(late.sum())
            self._now += late

    def _send(self, sent: Sequence[Sent], step: int) -> None:
        """Let groups of neighbours meet, and send; what has a delay is not waited for."""
        size, delay = sent[0].workers, sent[0].delay
        queued = sorted(map(self._message, sent), key=lambda message: message.release_s)
        now, free = self._now.view(-1, size), self._free.view(-1, size)
        ready = now.amax(1, keepdim=True)
        arrived = arrival(ready, free.amax(1, keepdim=True), queued, self._given.step_s)
        free.copy_(arrived.expand_as(free))
        if delay:
            self._due[step + delay] = self._free.clone()
            return
        end = torch.maximum(ready, arrived)
        self._straggling_s += float((ready - now).sum())
        self._link_s += float((end - ready).sum()) * size
        now.copy_(end.expand_as(now))

    def _message(self, sent: Sent) -> Message:
        step_s = self._given.step_s
        seconds = sum(self._given.collective_s(op, payload, sent.workers) for op, payload, _ in sent.collectives)
        return Message(step_s if sent.before is None else released_s(1 - sent.before, step_s), seconds)

    def _commit(self) -> None:
        """End a round: faults that fall into it lose it, and it is done again."""
        now_s = float(self._now.max())
        if self._mtbf_s is not None:
            lost_s = sum(self._losses(now_s - self._committed_s, self._mtbf_s))
            self._lost_s += lost_s
            self._now += lost_s
            now_s += lost_s
        self._committed_s = now_s

    def _losses(self, round_s: float, mtbf_s: float) -> Iterator[float]:
        """Yield the seconds that are lost to each fault before a round is done."""
        for _ in range(ATTEMPTS):
            until_s = float(torch.empty(1, dtype=torch.float64).exponential_(1 / mtbf_s, generator=self._draw))
            if until_s >= round_s:
                return
            self._faults += 1
            yield until_s + self._restart_s
        raise UsageError(
            f"--mtbf: a fault comes every {mtbf_s:.3g} s, and a round takes {round_s:.3g} s: none is ever done. Use a "
            "shorter period, or fewer workers."
        )
