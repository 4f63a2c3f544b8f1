"""Whether `auto()` chooses well on a training that had no part in its predictions: a table for docs/quality.md.

    python benchmarks/choices.py

Each training of the suite is left out in turn, but for the one with Muon and the one of 3000 steps, as nothing like
them is left. What plans keep of it is predicted from the others, and the plan is chosen as `auto()` chooses it. Then
what the plans kept of it in truth tells how soon each reaches the same loss. The links are such that `ddp()` computes a
fifth, a twentieth and a hundredth of the time. No training is run: the cells come from `quality.json`, and the time of
a step from the planner, without the time of codecs. `demo()` is not among the plans: it needs an optimizer of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import laconic
from laconic.cost import meta
from laconic.tools.launch.links import Level, Link
from laconic.tools.planner import quality
from laconic.tools.planner.auto import choice
from laconic.tools.planner.network import ComputedNetwork
from laconic.tools.planner.predict import PLANS, Forecast, Prediction, Scenario
from laconic.tools.planner.quality import Kept
from laconic.tools.planner.shapes import Shapes

WORKERS, COMPUTE_S = 4, 0.1
COMPUTING = (0.2, 0.05, 0.01)
"""The share of the time that workers compute under `ddp()`."""
ALONE = ("muon", "long")
"""The only trainings of their kind."""
NEAR = 1.15
"""How many times as long as the best plan a choice may take to be a good one."""


@dataclass(frozen=True)
class Choice:
    """What was chosen on one training and link, and the plan that was soonest in truth."""

    training: str
    computing: float
    chosen: laconic.Plan
    best: laconic.Plan
    times: float
    """How many times as long as the best plan the chosen one takes to the same loss."""


def choices() -> Iterator[Choice]:
    """Choose for each training and link."""
    for name, training in quality.record().items():
        for computing in COMPUTING:
            yield _choose(name, training, computing)


def _choose(name: str, training: dict[str, Any], computing: float) -> Choice:
    shapes = Shapes(meta(training["shapes"]), buffers=meta(training["buffers"]))
    ddp_bits = 8 * 8 * (WORKERS - 1) / WORKERS * shapes.parameters
    rate_bps = ddp_bits / (COMPUTE_S * (1 / computing - 1))
    steps, kinds = training["training"]["steps"], tuple(training["optimizers"])
    network = ComputedNetwork(Link((Level(WORKERS, rate_bps),)))
    scenario = Scenario(shapes, WORKERS, network, COMPUTE_S, bare=True, steps=steps, optimizers=kinds)
    others = tuple(each for each in quality.measured_cells() if each.name != name or name in ALONE)
    forecast = Forecast(PLANS, scenario)
    for each in forecast.rows:  # ddp() is among them
        each.predicted = quality.predict(each.resolved, scenario.training(), others)
    chosen = choice(forecast)
    known = {laconic.ddp(): 1.0, laconic.ddp("bf16"): 1.0, laconic.alone(): 0.0}
    known |= {laconic.plan(text): fmean(cell["kept"].values()) for text, cell in training["plans"].items()}
    truth = {plan: _truly(plan, kept, scenario) for plan, kept in known.items() if "demo" not in repr(plan)}
    best = min(truth, key=lambda each: truth[each])
    times = truth[chosen.resolved] / truth[best] if chosen.resolved in truth else float("nan")
    return Choice(name, computing, chosen.plan, best, times)


def _truly(plan: laconic.Plan, kept: float, scenario: Scenario) -> float:
    """Return the seconds to the progress of a step of `ddp()`, by what was kept; infinity for a lost training."""
    prediction = Prediction(plan, scenario)
    prediction.predicted = Kept(kept, kept, kept)
    factor = prediction.steps_factor or 0.0
    return prediction.step_s * factor if factor > 0 else float("inf")


def main() -> None:
    found = list(choices())
    print("| training | ddp() computes | chosen | soonest in truth | times as long |\n|---|---|---|---|---|")
    for each in found:
        print(f"| {each.training} | {each.computing:.0%} | `{each.chosen}` | `{each.best}` | {each.times:.2f} |")
    near = sum(each.times <= NEAR for each in found)
    print(f"\n{near} of {len(found)} choices reach the loss within {NEAR} times the time of the best measured plan.")


if __name__ == "__main__":
    main()
