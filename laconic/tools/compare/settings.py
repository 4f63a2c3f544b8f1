"""The settings of a run, checked before any worker starts: of the lab's training, or of a user's own script.

Any script that torchrun can start works, if it attaches `laconic.plan_from_env()` and calls `session.report(loss=...)`.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import laconic
from laconic.tools.compare.progress import VALIDATE_EVERY, Goal
from laconic.values import is_number, is_whole

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

MOST_WORKERS = 16  # on any machine; more need more cores, or --oversubscribe
WORKERS_PER_CORE = 4


class LabError(ValueError):
    """A mistake in what the user asked for. The message is ready to be shown."""


@dataclass(frozen=True)
class Settings:
    """One run of the lab's training: a plan, a model, its data and how long to train; with the slow link or without.

    The default is a training in which parallel work pays: batches are so small that noise rules, and four workers with
    `ddp()` need less than 1 / 2.5 of the steps that one needs (docs/log.md).

    >>> Settings(plan="power_sgd(rank=4)", workers=2, steps=10).width
    128
    >>> Settings(plan="ddp()", width=100, heads=3)
    Traceback (most recent call last):
    laconic.tools.compare.settings.LabError: --width 100 --heads 3: ...
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
            raise LabError(f"--seed {self.seed}: a seed is between 0 and 2**63 - 1. Use --seed 0.")
        if self.guard not in get_args(Guarding):
            raise LabError(
                f"--guard {self.guard}: it must be one of {', '.join(get_args(Guarding))}. Use --guard warn."
            )
        if self.model not in MODELS:
            raise LabError(f"--model {self.model}: the lab has {' and '.join(MODELS)}. Use --model gpt.")
        if self.model == "gpt":
            _check_heads(self.width, self.heads)
        elif self.data is not None:
            raise LabError(
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
        """The command of a worker. It imports laconic from where this process did."""
        return [sys.executable, *path_option(), "-m", "laconic.tools.lab.script", *self.arguments(folder)]

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
            raise LabError(f"--script {self.script}: there is no such file. Give the path of a training script.")

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


def path_option() -> list[str]:
    """The option of Python with which a worker imports laconic from where this process did."""
    return [] if {"", os.getcwd()} & set(sys.path) else ["-P"]


def label(plan: str, without_link: bool) -> str:
    """The name of a run in tables and figures."""
    return f"{plan} without the slow link" if without_link else plan


def _losses_file(folder: Path) -> Path:
    return folder / "losses.json"


def check_count(name: str, value: int | None) -> None:
    """Refuse a count below 1. None is not set."""
    if value is not None and not is_whole(value):
        option = f"--{name.replace('_', '-')}"
        raise LabError(f"{option} {value}: there must be at least 1. Use {option} 1 or more.")


def check_positive(name: str, value: float | None) -> None:
    """Refuse a number that is not finite and above 0. None is not set."""
    if value is not None and not (is_number(value) and value > 0):
        raise LabError(
            f"--{name.replace('_', '-')} {value:g}: it must be a number above 0. Leave it out for the default."
        )


def _check_heads(width: int, heads: int) -> None:
    if width % heads or (width // heads) % 2:
        fitting = [h for h in range(1, width // 2 + 1) if width % h == 0 and (width // h) % 2 == 0]
        hint = f"Heads that fit {width}: {', '.join(map(str, fitting))}." if fitting else "Use an even --width."
        raise LabError(f"--width {width} --heads {heads}: width / heads must be a whole, even number. {hint}")


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_workers(workers: int, cores: int) -> None:
    """Refuse more workers than the cores can serve.

    >>> check_workers(workers=16, cores=2)
    >>> check_workers(workers=500, cores=2)
    Traceback (most recent call last):
    laconic.tools.compare.settings.LabError: --workers 500: this machine has 2 usable cores, and ...
    """
    most = max(MOST_WORKERS, WORKERS_PER_CORE * cores)
    if workers > most:
        raise LabError(
            f"--workers {workers}: this machine has {cores} usable core{'s' * (cores != 1)}, and more than "
            f"{most} workers would mostly wait for one another. Use --workers {most} or fewer, or add "
            f"--oversubscribe to start {workers} all the same."
        )


@dataclass(frozen=True)
class Place:
    """The rank of this process among the workers that a launcher such as torchrun started."""

    worker: int
    workers: int


def found_place(environ: Mapping[str, str]) -> Place | None:
    """Read the place of this process from torchrun's variables; None if it is not a worker.

    >>> found_place({"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    Place(worker=2, workers=4)
    >>> found_place({"RANK": "2"}) is None
    True
    """
    if not all(name in environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    return Place(worker=int(environ["RANK"]), workers=int(environ["WORLD_SIZE"]))
