"""The settings of a run, checked before any worker starts: of the lab's training, or of a user's own script.

Any script that torchrun can start works, if it attaches `laconic.plan_from_env()` and calls `session.report(loss=...)`.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import laconic
from laconic.tools.compare.progress import VALIDATE_EVERY, Goal
from laconic.tools.errors import UsageError, check_count, check_positive
from laconic.tools.launch.workers import python
from laconic.values import is_whole

MODELS = ("gpt", "resnet")
Guarding: TypeAlias = Literal["off", "warn", "act"]
LAB_OPTIONS = (
    "steps",
    "model",
    "layers",
    "width",
    "heads",
    "context",
    "batch",
    "lr",
    "seed",
    "data",
    "bucket_mb",
    "guard",
)
"""The settings that reach the lab's script as its arguments."""


@dataclass(frozen=True)
class Settings:
    """One run of the lab's training: a plan, a model, its data and how long to train; with the slow link or without.

    The default is a training in which parallel work pays: batches are so small that noise rules, and four workers with
    `ddp()` need less than 1 / 2.5 of the steps that one needs (docs/log.md).

    >>> Settings(plan="power_sgd(rank=4)", workers=2, steps=10).width
    128
    >>> Settings(plan="ddp()", width=100, heads=3)
    Traceback (most recent call last):
    laconic.tools.errors.UsageError: --width 100 --heads 3: ...
    """

    plan: str
    workers: int = 4
    steps: int = 300
    model: str = "gpt"
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64
    batch: int = 4
    lr: float = 5e-3
    seed: int = 0
    data: Path | None = None
    bucket_mb: float = 25.0
    guard: Guarding = "off"
    seconds: float | None = None
    until_loss: float | None = None
    validate_every: int = VALIDATE_EVERY
    without_link: bool = False

    def __post_init__(self) -> None:
        laconic.plan(self.plan)
        for name in ("workers", "steps", "layers", "width", "heads", "context", "batch", "validate_every"):
            check_count(name, getattr(self, name))
        for name in ("lr", "bucket_mb", "seconds", "until_loss"):
            check_positive(name, getattr(self, name))
        if not (is_whole(self.seed, least=0) and self.seed < 2**63):
            raise UsageError(f"--seed {self.seed}: a seed is between 0 and 2**63 - 1. Use --seed 0.")
        if self.guard not in get_args(Guarding):
            known = ", ".join(get_args(Guarding))
            raise UsageError(f"--guard {self.guard}: it must be one of {known}. Use --guard warn.")
        if self.model not in MODELS:
            raise UsageError(f"--model {self.model}: the lab has {' and '.join(MODELS)}. Use --model gpt.")
        if self.model == "gpt":
            _check_heads(self.width, self.heads)
        elif self.data is not None:
            raise UsageError(
                f"--model {self.model} --data {self.data}: the ResNet trains on scikit-learn's digits, not on text. "
                "Leave out --data, or use --model gpt."
            )

    title = "the lab's training"

    @property
    def label(self) -> str:
        """The plan, and whether it runs without the slow link of the others."""
        return label(self.plan, self.without_link)

    @property
    def goal(self) -> Goal:
        """When the run ends. The learning rate follows the steps in any case."""
        return Goal(self.steps, self.seconds, self.until_loss, self.validate_every)

    def arguments(self, folder: Path) -> list[str]:
        """The arguments of the lab's script."""
        given = {name: getattr(self, name) for name in LAB_OPTIONS} | {"losses": _losses_file(folder)}
        return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]

    def command(self, folder: Path) -> list[str]:
        """The command of a worker."""
        return python("-m", "laconic.tools.lab.script", *self.arguments(folder))

    def results(self, folder: Path) -> dict[str, Any]:
        """The fields of the outcome that the lab's script reports by itself."""
        losses = json.loads(_losses_file(folder).read_text())
        return {"model": self.model, "loss_of": "validation", **losses}


@dataclass(frozen=True)
class Script:
    """One run of a user's script."""

    plan: str
    script: Path
    arguments: tuple[str, ...] = ()
    workers: int = 4
    steps: int | None = None
    seconds: float | None = None
    until_loss: float | None = None
    validate_every: int = VALIDATE_EVERY
    without_link: bool = False

    def __post_init__(self) -> None:
        laconic.plan(self.plan)
        check_count("workers", self.workers)
        check_count("validate_every", self.validate_every)
        check_count("steps", self.steps)
        check_positive("seconds", self.seconds)
        check_positive("until_loss", self.until_loss)
        if not self.script.is_file():
            raise UsageError(f"--script {self.script}: there is no such file. Give the path of a training script.")

    @property
    def label(self) -> str:
        """The plan, and whether it runs without the slow link of the others."""
        return label(self.plan, self.without_link)

    @property
    def title(self) -> str:
        """What error messages call the run."""
        return f"--script {self.script}"

    @property
    def goal(self) -> Goal:
        """When `session.report` returns True."""
        return Goal(self.steps, self.seconds, self.until_loss, self.validate_every)

    def command(self, folder: Path) -> list[str]:
        """The command of a worker."""
        return [sys.executable, str(self.script), *self.arguments]

    def results(self, folder: Path) -> dict[str, Any]:
        """The fields of the outcome that are known without reports."""
        return {"model": self.script.name}


Run = Settings | Script


def label(plan: str, without_link: bool) -> str:
    """The name of a run in tables and figures."""
    return f"{plan} without the slow link" if without_link else plan


def _losses_file(folder: Path) -> Path:
    return folder / "losses.json"


def _check_heads(width: int, heads: int) -> None:
    if width % heads or (width // heads) % 2:
        fitting = [h for h in range(1, width // 2 + 1) if width % h == 0 and (width // h) % 2 == 0]
        hint = f"Heads that fit {width}: {', '.join(map(str, fitting))}." if fitting else "Use an even --width."
        raise UsageError(f"--width {width} --heads {heads}: width / heads must be a whole, even number. {hint}")
