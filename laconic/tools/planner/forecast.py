"""The predictions of several plans side by side: ranked, as data, and as one sentence of advice."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from laconic.noise import LEAST_WORTH
from laconic.plans.methods import alone, ddp
from laconic.plans.plan import Plan
from laconic.tools.planner.predict import Prediction, Scenario
from laconic.tools.units import percent, rate_text

NEEDS = (0.5, 0.8, 0.95)
"""The shares of the time to compute for which the JSON has the rate of the link that they need."""
WORTH = 1.05
"""How many times sooner than `ddp()` a plan must reach the same loss to be worth a change."""


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

    def as_json(self, budget_bytes: float | None = None) -> Any:
        """Return everything as an object for JSON. `budget_bytes` is what may go over a link in a day."""
        s = self.scenario
        return {
            "parameters": s.shapes.parameters,
            "workers": s.workers,
            "rate_bps": s.network.rate_bps,
            "compute_s": s.compute_s,
            "noise": s.noise,
            "gain": s.gain(),
            "workers_sharing_a_link": s.sharing,
            "steps": s.steps,
            "optimizers": list(s.optimizers),
            "rows": [self._row(each, budget_bytes) for each in self.rows],
            "advice": self.advice,
        }

    def _row(self, each: Prediction, budget_bytes: float | None) -> dict[str, Any]:
        low, high = each.interval_s
        row: dict[str, Any] = {
            "plan": repr(each.plan),
            "resolved": repr(each.resolved),
            "sent_bytes_per_step": each.sent_bytes_per_step,
            "link_bytes_per_step": each.link_bytes_per_step,
            "sent_bytes_by_level": each.sent_bytes_by_level,
            "rounds_per_step": each.rounds_per_step,
            "bytes_a_day": each.bytes_a_day,
            "codec_s": each.codec_s,
            "exposed_s": each.now.exposed_s,
            "step_s": each.step_s,
            "step_s_low": low,
            "step_s_high": high,
            "utilisation": each.now.utilisation,
            "speedup_over_ddp": self.ddp.step_s / each.step_s,
            "memory_bytes": each.memory_bytes,
            "kept": each.kept,
            "kept_low": None if each.predicted is None else each.predicted.low,
            "kept_high": None if each.predicted is None else each.predicted.high,
            "steps_factor": each.steps_factor,
            "sooner_than_ddp": each.sooner_than(self.ddp),
            "sooner_than_alone": each.sooner_than(self.alone),
            "break_even_bps": None if each is self.ddp else each.break_even_bps(self.ddp),
            "needs_bps": {f"{need:.0%}": each.needs_bps(need) for need in NEEDS},
            "timeout_s": each.timeout_s,
        }
        if budget_bytes is not None:
            row["within_budget"] = each.bytes_a_day <= budget_bytes
        return {key: value if not isinstance(value, float) or isfinite(value) else None for key, value in row.items()}

    @property
    def advice(self) -> str:
        """One sentence: which plan to use, or none, and why."""
        s = self.scenario
        if s.noise is not None and s.gain() < LEAST_WORTH:
            return (
                f"Train by alone(): under a noise of {s.noise:.3g}, {s.workers} workers are worth at most "
                f"{s.gain():.2f} that train by themselves, whatever they send. Smaller batches make better use of them."
            )
        known = [each for each in self.rows if each.loss_s is not None and each.plan not in (ddp(), alone())]
        best = max(known, key=lambda each: each.sooner_than(self.ddp) or 0.0, default=None)
        busy = f"under ddp() workers compute {percent(self.ddp.now.utilisation)} of the time"
        if best is None:
            return f"{busy[0].upper()}{busy[1:]}. {self._unknown()}"
        sooner, than_alone = best.sooner_than(self.ddp) or 0.0, best.sooner_than(self.alone) or 0.0
        if sooner < WORTH and (self.ddp.sooner_than(self.alone) or 0.0) >= 1:
            how = f"only {sooner:.2f} times sooner" if sooner >= 1 else f"{1 / sooner:.2f} times later"
            return f"Do not compress: {busy}, and {best.plan}, the best of the others, reaches the same loss {how}."
        if than_alone < 1:
            return (
                f"Do not train together over this link: {best.plan}, the best of these plans, reaches the same loss "
                f"{1 / than_alone:.1f} times later than workers without communication. Get a faster link, longer steps "
                "(larger batches), or a plan that sends less."
            )
        factor = best.steps_factor or 1.0
        kept = percent(best.kept)
        more = "" if factor < 1.005 else f" It needs {factor:.2f} times as many steps, for it keeps {kept}."
        rate = best.break_even_bps(self.ddp)
        until = "" if rate is None else f" On links faster than {rate_text(rate, digits=3)}, do not compress."
        return (
            f"Use {best.plan}: it reaches the same loss {sooner:.1f} times sooner than ddp() and {than_alone:.1f} "
            f"times sooner than alone(); {busy}, under it {percent(best.now.utilisation)}.{more}{until}"
        )

    def _unknown(self) -> str:
        others = [each for each in self.rows if each.loss_s is None]
        if not others:
            return "No other plan was given."
        quick = min(others, key=lambda each: each.step_s)
        return (
            f"A step of {quick.plan} is {self.ddp.step_s / quick.step_s:.1f} times as fast as one of ddp(), but what "
            "it does to the loss was not measured: compare it beside alone() first (laconic compare)."
        )
