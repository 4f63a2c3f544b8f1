"""The runs of a comparison, checked before any worker starts: what is trained with which plan, and when it ends.

Any script that torchrun can start works, if it attaches `laconic.plan_from_env()` and calls `session.report(loss=...)`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from laconic.plans.plan import Plan
from laconic.tools.errors import UsageError, check_count, check_positive
from laconic.tools.lab.settings import STEPS, Lab

VALIDATE_EVERY = 5


@dataclass(frozen=True)
class Goal:
    """When a run ends: at the first of these that it reaches. None sets no limit. And how often it is validated.

    `validate_every` counts reports, where the script gives a function that computes its validation loss.
    """

    steps: int | None = None
    seconds: float | None = None
    until_loss: float | None = None
    validate_every: int = VALIDATE_EVERY

    def __post_init__(self) -> None:
        for name in ("steps", "validate_every"):
            check_count(name, getattr(self, name))
        for name in ("seconds", "until_loss"):
            check_positive(name, getattr(self, name))


@dataclass(frozen=True)
class Script:
    """A user's script and its arguments."""

    path: Path
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise UsageError(f"--script {self.path}: there is no such file. Give the path of a training script.")

    @property
    def title(self) -> str:
        """What error messages call the training."""
        return f"--script {self.path}"

    @property
    def name(self) -> str:
        """What results call the training."""
        return self.path.name

    def command(self, steps: int | None) -> list[str]:
        """The command of a worker."""
        return [sys.executable, str(self.path), *self.arguments]


@dataclass(frozen=True)
class TrainingRun:
    """One run of a training with a plan, on the workers of this machine; with the slow link or without.

    >>> from laconic import ddp
    >>> TrainingRun(ddp(), goal=Goal(steps=10)).label
    'ddp()'
    """

    plan: Plan
    training: Lab | Script = field(default_factory=Lab)
    workers: int = 4
    goal: Goal = Goal(STEPS)
    without_link: bool = False

    def __post_init__(self) -> None:
        check_count("workers", self.workers)

    @property
    def label(self) -> str:
        """The name of the run in tables and figures."""
        return label(self.plan, self.without_link)


def label(plan: Plan, without_link: bool, changed_to: str | None = None) -> str:
    """The plan, what the run changed it to, and whether it runs without the slow link of the others.

    >>> from laconic import ddp
    >>> label(ddp(), without_link=True)
    'ddp() without the slow link'
    """
    shown = f"{plan}" if changed_to is None else f"{plan} -> {changed_to}"
    return f"{shown} without the slow link" if without_link else shown
