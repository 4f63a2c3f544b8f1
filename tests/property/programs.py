"""What is drawn: how a model is set up, and what happens in a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tests.property.plans import PLANS, Known

Wrap = Literal["bare", "ddp"]


@dataclass(frozen=True)
class Setup:
    """How a model is made and attached, the same on every worker."""

    plan: str = "ddp"
    workers: int = 2
    wrap: Wrap = "bare"
    features: frozenset[str] = frozenset()
    """Parts of the model: see `nets.Net`."""
    optimizer: str = "sgd"
    split: bool = False
    """Whether two optimizers share the parameters."""
    reversed: bool = False
    """Whether they step in another order than they were given in."""
    amp: bool = False
    scheduled: bool = False
    seed: int = 0
    nonfinite: Literal["skip", "exclude"] = "skip"
    levels: bool = False
    """Whether groups of two of four workers are given as `levels=`: 0 and 2, 1 and 3."""

    @property
    def known(self) -> Known:
        """The plan as the oracle knows it."""
        return PLANS[self.plan]


@dataclass(frozen=True)
class Nan:
    """NaN on one worker: in the whole loss, or in the gradient of one parameter."""

    worker: int
    parameter: str | None = None


@dataclass(frozen=True)
class StepOptions:
    """What happens in one step."""

    parts: int = 1
    """How many backward passes are accumulated."""
    clip: float | None = None
    branch: tuple[bool, ...] = (True, True, True, True)
    """Which workers use the branch of the model."""
    nan: Nan | None = None


def possible_setup(setup: Setup) -> Setup:
    """Return the setup without what torch refuses, with as many workers as the plan needs."""
    if not setup.known.fits(setup.workers):
        setup = replace(setup, workers=4 if setup.known.fits(4) else 2)
    if setup.known.wide:
        setup = replace(setup, features=setup.features | {"wide"})
    refused = {"complex", "fp16"} if setup.amp else set()  # torch's GradScaler takes neither
    levels = setup.levels and setup.workers == 4
    return replace(setup, features=setup.features - refused, reversed=setup.reversed and setup.split, levels=levels)


def possible_step(options: StepOptions, setup: Setup, gradients: bool, sound: bool) -> StepOptions:
    """Return the options with NaN only where some worker stays finite. `gradients`: whether the step averages them."""
    nan = options.nan
    if nan is not None:
        nan = replace(nan, worker=nan.worker % setup.workers)
        if setup.split and (setup.amp or setup.wrap == "bare"):
            nan = replace(nan, parameter=None)  # found for each optimizer by itself: those before it have stepped
        if setup.nonfinite == "exclude" and gradients:  # bucket by bucket: let all of a worker's be left out, or none
            nan = None if setup.amp else replace(nan, parameter=None)
            options = replace(options, branch=(True,) * 4)
        if not gradients and not setup.amp and (setup.workers == 1 or not sound):
            nan = None
    return replace(options, nan=nan)
