"""The virtual clock alone: no training, up to hundreds of thousands of workers.

What is sent, and when it is released, is that of `laconic plan` (`predict.py`). Each step is a few operations on one
vector, the time of every worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from laconic import Plan, ddp
from laconic.tools.errors import UsageError
from laconic.tools.launch.links import Link
from laconic.tools.planner.network import ComputedNetwork
from laconic.tools.planner.predict import Prediction, Scenario, Transfer
from laconic.tools.planner.shapes import Shapes
from laconic.tools.planner.timeline import Message
from laconic.tools.simulate.clock import Conditions, TimeUse, arrival


@dataclass(frozen=True)
class TimeOutcome:
    """The virtual seconds of a run, what they were used for, and what one worker sent."""

    plan: str
    workers: int
    steps: int
    seconds: float
    sent_bytes: float
    use: TimeUse

    @property
    def step_s(self) -> float:
        """The mean seconds of a step."""
        return self.seconds / self.steps


class TimeOnly:
    """Simulates the time of a run."""

    def __init__(
        self, plan: Plan, shapes: Shapes, workers: int, conditions: Conditions, machine: int | None = None
    ) -> None:
        self.plan, self.workers, self._given = plan, workers, conditions
        network = conditions.network or ComputedNetwork(Link(()))  # not asked where sending takes no time
        scenario = Scenario(shapes, workers, network, conditions.step_s, machine=machine)
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

    def run(self, steps: int) -> TimeOutcome:
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
        return TimeOutcome(repr(self.plan), self.workers, steps, float(self._now.max()), sent_bytes, use)

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
        queued = sorted((self._message(each) for each in sent), key=lambda message: message.release_s)
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

    def _message(self, sent: Transfer) -> Message:
        network = self._given.network
        return Message(sent.released_s(self._given.step_s), 0.0 if network is None else sent.seconds(network))
