"""`auto()`: the plan that measures the network and the steps of a training, and goes on with a plan of the front.

At `attach`, collectives and codecs are measured for a few seconds. Ten steps later the time of a step is known, too:
the plan that reaches the same loss first is predicted as `laconic plan` does, and all workers go on with it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from laconic.cost import meta
from laconic.plans.methods import ddp, power_sgd
from laconic.plans.plan import Plan
from laconic.plans.text import register
from laconic.session.live_model import kinds_of
from laconic.session.observers import StepObserver
from laconic.session.session import Session
from laconic.tools.planner.measure import Meter, time_codec, time_collective
from laconic.tools.planner.network import MeasuredNetwork
from laconic.tools.planner.predict import PLANS, WORTH, Forecast, Prediction, Scenario
from laconic.tools.planner.probe_data import OPS, WORLD, Timing
from laconic.tools.planner.quality import STEPS
from laconic.tools.planner.shapes import Shapes
from laconic.tools.units import percent, rate_text
from laconic.values import call, is_whole

logger = logging.getLogger(__name__)

LONGEST_S = 0.05
"""The time of the largest collective that is measured."""
REPEAT_S = 0.1
"""How long each codec is measured."""
WARM_UP_STEPS = 2
MEASURED_STEPS = 8


@dataclass(frozen=True, repr=False)
class AutoPlan(Plan):
    """Begins as `power_sgd()`, which sends little and keeps the workers equal, until its observer can choose."""

    steps: int = STEPS

    def observer(self) -> AutoObserver:
        """Return the observer that chooses."""
        return AutoObserver(self.steps)

    def __repr__(self) -> str:
        return call("auto", {} if self.steps == STEPS else {"steps": self.steps})


def auto(steps: int = STEPS) -> Plan:
    """Measure the network for a few seconds, and go on with the plan of the measured front that fits it.

    What plans keep of a training depends on its length, which is `steps`, on its optimizers and on its shapes. Which
    plan is chosen, and why, is logged; `session.change(plan)` overrules it. docs/plan.md has the rule.

    >>> auto(), auto(steps=20_000)
    (auto(), auto(steps=20000))
    """
    if not is_whole(steps):
        raise ValueError(f"auto(steps={steps!r}): it must be the number of steps of the training, such as 20000.")
    start = power_sgd()
    return AutoPlan(start.schedule, start.codec, steps=steps)


register(auto)


class AutoObserver(StepObserver):
    """Chooses a plan after the first steps, once."""

    def __init__(self, steps: int) -> None:
        self._length = steps
        self._timings: tuple[Timing, ...] = ()
        self._codec_s: dict[Plan, float] = {}
        self._last: float | None = None
        self._steps: list[float] = []
        self._sending_s = 0.0

    def attached(self, session: Session) -> None:
        """Measure collectives and codecs, on all workers together."""
        if session.workers == 1:
            logger.warning("auto(): one worker sends nothing; there is nothing to choose.")
            return
        if session.workers != dist.get_world_size():
            raise ValueError(
                f"auto() measures among the {dist.get_world_size()} workers of the default process group, and this "
                f"session has {session.workers}. Choose a plan: laconic probe and laconic plan help."
            )
        device = next(iter(session.parameters.values())).device
        meter = Meter(device, device if dist.get_backend() != "gloo" else torch.device("cpu"))
        try:
            shapes = {name: tuple(p.shape) for name, p in session.parameters.items()}
            self._codec_s = {each: time_codec(meter, each, shapes, REPEAT_S).seconds for each in PLANS}
            timed = [time_collective(meter, op, WORLD, LONGEST_S) for op in OPS]
            self._timings = tuple(timing for of_one in timed for timing in of_one)
        finally:
            meter.close()

    def after_step(self, session: Session) -> None:
        """Measure a step; choose a plan when enough are measured."""
        if not self._timings:
            return
        now, sending_s = time.perf_counter(), session.ledger.seconds
        if self._last is not None:  # without what the step has spent in collectives
            took_s = now - self._last
            self._steps.append(max(0.1 * took_s, took_s - (sending_s - self._sending_s)))
        self._last, self._sending_s = now, sending_s
        if len(self._steps) == WARM_UP_STEPS + MEASURED_STEPS:
            self._choose(session)
            self._timings = ()

    def _choose(self, session: Session) -> None:
        mine_us = round(1e6 * median(self._steps[WARM_UP_STEPS:]))
        compute_s = max(row[0] for row in session.gather([mine_us])) / 1e6
        network = MeasuredNetwork(self._timings, session.workers)
        shapes = Shapes(meta({name: p.shape for name, p in session.parameters.items()}), buffers=meta(session.buffers))
        scenario = Scenario(
            shapes,
            session.workers,
            network,
            compute_s,
            codec_s=self._codec_s,
            bare=session.can_regroup,
            steps=self._length,
            optimizers=kinds_of(session.optimizers),
        )
        forecast = Forecast(list(self._codec_s), scenario)
        chosen = choice(forecast)
        leads = session.group is None or session.group.rank() == 0
        session.change(chosen.plan)
        if leads:
            logger.warning("%s", _message(forecast, chosen, session.step))


def choice(forecast: Forecast) -> Prediction:
    """Return the plan that reaches the same loss first, or `ddp()` where no other is sooner by `WORTH`."""
    best = forecast.ranked[0]
    sooner = best.sooner_than(forecast.ddp) or 0.0
    return best if best.plan == ddp() or sooner >= WORTH else forecast.ddp


def _message(forecast: Forecast, chosen: Prediction, step: int) -> str:
    s = forecast.scenario
    rows = "\n".join(
        f"  {each.plan!r}: step {each.step_s:.3g} s, sends {each.sent_bytes_per_step:,.0f} bytes, "
        f"keeps {percent(each.kept)}, same loss {each.sooner_than(forecast.ddp) or 0.0:.2f} times as soon as ddp()"
        for each in forecast.ranked
    )
    return (
        f"auto(), step {step}: a step computes for {s.compute_s:.3g} s, the rate of the network is "
        f"{rate_text(s.network.rate_bps, digits=3)}, the training has {s.steps} steps (auto(steps=...) says how many; "
        f"{', '.join(s.optimizers)}). All workers go on with {chosen.plan!r}.\n{rows}\n"
        f"  {forecast.advice} session.change(plan) overrules this."
    )
