"""What a plan keeps of a training, predicted from the trainings that were measured (`quality.json`).

    kept = (loss of alone() - loss of the plan) / (loss of alone() - loss of ddp()), after equal steps

Plans of one family lose alike. For each family a straight line is fitted, where `strength` is the rank of factors, or
the steps between two rounds of weights:

    log(0.1 + lost) = a + b log(strength) + c log(width) + d log(steps) + e [SGD] + f log(noise)        lost = 1 - kept

It is fitted by least squares, and b to f are pulled to 0, so that few trainings are enough. Where the gradient noise is
unknown (`noise.py`), a line without it is fitted. The interval is for nine of ten trainings like the measured ones.
What is far from all of them has no prediction.
`benchmarks/trainings.py --record` adds to the file, and docs/quality.md says how well trainings left out are predicted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from laconic.codecs import ByShape, Cast, Codec, ErrorFeedback, Exact, LowRank, Quantized, TopK
from laconic.plans.outer import Nesterov
from laconic.plans.plan import Plan
from laconic.plans.schedules import Every, Never, Streaming
from laconic.plans.targets import Kind
from laconic.plans.text import plan as parse_plan

STEPS = 1000
"""The length of a training that does not say its own."""
FAR = 5.0
"""How many times a width, a number of steps or a strength may lie outside of what was measured."""
SOFT, MOST_LOST = 0.1, 2.0
"""Losses below the first are told apart less and less: seeds differ by as much. Of more than 200 %, none is of use."""
MOST_NOISE = 64.0
"""Under so much noise or more, the workers' gradients have next to nothing in common."""
PULL = 3.0
"""How much the slopes are pulled to 0: as three cells would, so that few trainings are enough."""
LEAST_TRAININGS = 4
NINE_OF_TEN = 1.645
"""How many standard deviations to each side the interval has, as of a normal distribution."""


@dataclass(frozen=True)
class TrainingFacts:
    """What is known of a training: the width of its matrices, its number of steps, the kind of its optimizer.

    And the gradient noise in batches of one worker, if it was measured.
    """

    width: float
    steps: int = STEPS
    optimizer: Kind = "adaptive"
    noise: float | None = None


@dataclass(frozen=True)
class Kept:
    """What a plan keeps, and the interval in which it is for nine of ten trainings."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Cell:
    """What one plan kept of one training, in the mean over seeds."""

    name: str
    training: TrainingFacts
    plan: str
    kept: float


def family_of(plan: Plan, width: float = math.inf) -> tuple[str, float] | None:
    """Return the family of a plan and its strength; None if no plan like it was measured.

    A low rank that a matrix of this width is too small for sends few bits.
    """
    codec, feedback = _inside(plan.codec)
    if isinstance(plan.schedule, Never) or plan.topology.inner is not None:
        return None
    if not plan.local:
        few = isinstance(codec, Quantized) and codec.bits >= 4
        if few or (isinstance(codec, LowRank) and codec.rank * 4 >= width and codec.bits):
            return ("few bits", 1.0) if feedback else None
        if isinstance(codec, LowRank) and feedback and codec.rounds == "two":
            return "low rank", float(codec.rank)
        return None
    if not isinstance(plan.schedule, Every | Streaming) or plan.outer != Nesterov(lr=1.0, momentum=0.0):
        return None
    if getattr(plan.schedule, "mix", None) is not None:
        return None
    if isinstance(codec, Exact) or (isinstance(codec, Quantized) and feedback):
        return "deltas", float(plan.schedule.period)
    if isinstance(codec, TopK) and feedback and codec.fraction == 0.06:
        return "sparse deltas", float(plan.schedule.period)
    return None


@cache
def _family_of(plan: str, width: float) -> tuple[str, float] | None:
    return family_of(parse_plan(plan), width)


def _inside(codec: Codec) -> tuple[Codec, bool]:
    """Return the codec of matrices without what is around it, and whether there is error feedback."""
    if isinstance(codec, ByShape):
        codec = codec.codec
    return (codec.codec, True) if isinstance(codec, ErrorFeedback) else (codec, False)


def predict(plan: Plan, training: TrainingFacts, cells: Sequence[Cell] | None = None) -> Kept | None:
    """Predict what a plan keeps; None if nothing like it was measured.

    >>> predict(parse_plan("ddp()"), TrainingFacts(width=128))
    Kept(value=1.0, low=1.0, high=1.0)
    """
    if not plan.local and isinstance(plan.codec, Exact | Cast):
        return Kept(1.0, 1.0, 1.0)
    if isinstance(plan.schedule, Never) and plan.topology.inner is None:
        return Kept(0.0, 0.0, 0.0)
    found = family_of(plan, training.width)
    if found is None:
        return None
    noisy = training.noise is not None
    law = _law(found[0], noisy) if cells is None else fit(found[0], cells, noisy)
    return None if law is None else law.kept(found[1], training)


@dataclass(frozen=True, eq=False)
class Law:
    """The fitted line of one family."""

    weights: Tensor
    """[features]"""
    error: float
    """The standard deviation of trainings that had no part in the fit."""
    ranges: tuple[tuple[float, float], ...]
    """The least and the largest strength, width and steps that were measured."""
    optimizers: frozenset[str]

    def kept(self, strength: float, training: TrainingFacts) -> Kept | None:
        """Predict; None far from what was measured."""
        given = (strength, training.width, training.steps)
        if training.optimizer not in self.optimizers:
            return None
        if not all(low / FAR <= x <= high * FAR for x, (low, high) in zip(given, self.ranges, strict=True)):
            return None
        x = _features(strength, training)[: len(self.weights)]
        middle = float(x @ self.weights)
        wide = NINE_OF_TEN * self.error
        lost = [min(MOST_LOST, math.exp(middle + each) - SOFT) for each in (0.0, wide, -wide)]
        return Kept(*(1 - max(0.0, each) for each in lost))


def fit(family: str, cells: Iterable[Cell], noisy: bool = False) -> Law | None:
    """Fit the line of a family, with the noise if it is known; None where too few trainings were measured."""
    found = [(each, _family_of(each.plan, each.training.width)) for each in cells]
    known = [(each, its[1]) for each, its in found if its is not None and its[0] == family]
    known = [(each, strength) for each, strength in known if not noisy or each.training.noise is not None]
    names = {each.name for each, _ in known}
    if len(names) < LEAST_TRAININGS:
        return None
    x = torch.stack([_features(strength, each.training) for each, strength in known])
    x = x if noisy else x[:, :-1]
    lost = torch.tensor([1 - each.kept for each, _ in known], dtype=torch.float64)
    y = (lost.clamp(0, MOST_LOST) + SOFT).log()
    weights = _least_squares(x, y)
    # Plans of one training err together, so the error is that of each training by a line of the others.
    errors = []
    for name in names:
        own = torch.tensor([each.name == name for each, _ in known])
        errors.append(float((y[own] - x[own] @ _least_squares(x[~own], y[~own])).square().mean()))
    error = math.sqrt(fmean(errors))
    ranges = tuple(
        (min(column), max(column))
        for column in zip(*((s, each.training.width, each.training.steps) for each, s in known), strict=True)
    )
    optimizers = frozenset(each.training.optimizer for each, _ in known)
    return Law(weights, error, ranges, optimizers)


def _least_squares(x: Tensor, y: Tensor) -> Tensor:
    """Solve for the weights of [cells, features], all but the level pulled to 0."""
    pull = PULL * torch.eye(x.shape[1], dtype=torch.float64)
    pull[0, 0] = 1e-6
    weights: Tensor = torch.linalg.solve(x.T @ x + pull, x.T @ y)
    return weights


def _features(strength: float, training: TrainingFacts) -> Tensor:
    """The numbers that the line weighs, each 0 in the middle of what was measured; the noise is the last."""
    noise = 16.0 if training.noise is None else min(max(training.noise, 1 / MOST_NOISE), MOST_NOISE)
    return torch.tensor(
        [
            1.0,
            math.log2(strength / 8),
            math.log2(training.width / 128),
            math.log2(training.steps / 300),
            float(training.optimizer == "sgd"),
            math.log2(noise / 16),
        ],
        dtype=torch.float64,
    )


@cache
def _law(family: str, noisy: bool) -> Law | None:
    return fit(family, measured_cells(), noisy)


@cache
def measured_cells() -> tuple[Cell, ...]:
    """Return what was measured at the learning rate of `ddp()`, in the mean over seeds."""
    return tuple(
        Cell(name, TrainingFacts(**each["training"]), plan, fmean(by_seed))
        for name, each in record().items()
        for plan, cell in each["plans"].items()
        if (by_seed := cell["kept"].values())
    )


@cache
def record() -> dict[str, Any]:
    """Read the file: of each training what it is, and what each plan kept of it, by seed."""
    found: Any = json.loads(resources.files("laconic.tools.planner").joinpath("quality.json").read_text())
    trainings: dict[str, Any] = found["trainings"]
    return trainings
