"""Predictions as data: one object for each plan."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from laconic.plans.methods import alone, ddp
from laconic.plans.plan import Plan
from laconic.tools.planner.advice import advice
from laconic.tools.planner.front import MEASURED_PARAMETERS, SOURCE
from laconic.tools.planner.predict import Prediction, Scenario

SECONDS_A_DAY = 86_400


class Forecast:
    """The predictions of several plans for one training, and of `ddp()` and `alone()` beside them."""

    def __init__(self, plans: Sequence[Plan], scenario: Scenario) -> None:
        self.scenario = scenario
        self.rows = [Prediction(plan, scenario) for plan in plans]
        self.ddp = self._of(ddp())
        self.alone = self._of(alone())

    def _of(self, plan: Plan) -> Prediction:
        return next((each for each in self.rows if each.plan == plan), None) or Prediction(plan, self.scenario)

    @property
    def ranked(self) -> list[Prediction]:
        """The plans by the time to the same loss; those of which it is unknown come last, by the time of a step."""
        return sorted(self.rows, key=lambda each: (each.loss_s is None, each.loss_s or each.step_s))

    @property
    def advice(self) -> str:
        """One sentence: which plan to use, or none, and why."""
        return advice(self.rows, self.ddp, self.alone)

    def as_json(self, needs: Sequence[float] = (), price: float | None = None, budget: float | None = None) -> Any:
        """Return everything as an object for JSON; `needs` are shares of the time, as 0.8."""
        s = self.scenario
        return {
            "parameters": s.shapes.parameters,
            "workers": s.workers,
            "rate_bps": s.network.rate_bps,
            "compute_s": s.compute_s,
            "rows": [self._row(each, needs, price, budget) for each in self.rows],
            "advice": self.advice,
        }

    def _row(self, each: Prediction, needs: Sequence[float], price: float | None, budget: float | None) -> Any:
        low, high = each.interval_s
        row: dict[str, Any] = {
            "plan": repr(each.plan),
            "sent_bytes_per_step": each.sent_bytes_per_step,
            "sent_bytes_by_level": each.sent_bytes_by_level,
            "rounds_per_step": each.rounds_per_step,
            "peak_bps": each.peak_bps,
            "codec_s": each.codec_s,
            "exposed_s": each.now.exposed_s,
            "step_s": each.step_s,
            "step_s_low": low,
            "step_s_high": high,
            "utilisation": each.now.utilisation,
            "speedup_over_ddp": self.ddp.step_s / each.step_s,
            "memory_bytes": each.memory_bytes,
            "kept": each.kept,
            "kept_source": None if each.measured is None else f"{SOURCE}; seeds: {each.measured.seeds}",
            "kept_model_ratio": self.scenario.shapes.parameters / MEASURED_PARAMETERS,
            "steps_factor": each.steps_factor,
            "sooner_than_ddp": each.sooner_than(self.ddp),
            "sooner_than_alone": each.sooner_than(self.alone),
            "break_even_bps": None if each is self.ddp else each.break_even_bps(self.ddp),
            "goodput": each.goodput,
            "timeout_s": each.timeout_s,
        }
        if needs:
            row["needs_bps"] = {f"{100 * need:g}": each.needs_bps(need) for need in needs}
        daily = each.sent_bytes_per_step / each.step_s * SECONDS_A_DAY if each.step_s else 0.0
        if price is not None:
            row["price_of_1000_steps"] = 1000 * each.sent_bytes_per_step * self.scenario.workers / 1e9 * price
        if budget is not None:
            row["bytes_a_day"], row["within_budget"] = daily, daily <= budget
        return {key: value if not isinstance(value, float) or isfinite(value) else None for key, value in row.items()}
