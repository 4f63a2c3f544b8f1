"""What one training run of the lab is, checked before anything starts.

Everything here is decided before a worker exists, so a mistake costs a second and one message: what was
written, the rule, and the way out. The messages name command-line options because that is where the values
come from.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import laconic
from laconic.compare.reporting import Goal

MODELS = ("gpt", "resnet")
MOST_WORKERS = 16  # on any machine; more need cores to show for it, or --oversubscribe
WORKERS_PER_CORE = 4


class LabError(ValueError):
    """A value that the lab cannot run with. The message is ready to be shown."""


@dataclass(frozen=True)
class Settings:
    """One run: a plan, a model, its data and how long to train.

    >>> Settings(plan="power_sgd(rank=4)", workers=2, steps=10).width
    128
    >>> Settings(plan="ddp()", width=100, heads=3)
    Traceback (most recent call last):
    laconic.compare.settings.LabError: --width 100 --heads 3: ...
    """

    plan: str
    workers: int = 4
    steps: int = 192
    model: str = "gpt"
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    batch: int = 4
    lr: float = 3e-3
    seed: int = 0
    data: Path | None = None
    bucket_mb: float = 25.0
    seconds: float | None = None
    until_loss: float | None = None

    def __post_init__(self) -> None:
        laconic.plan(self.plan)
        for name in ("workers", "steps", "layers", "width", "heads", "context", "batch"):
            _at_least_one(name, getattr(self, name))
        _positive("lr", self.lr)
        _positive("bucket-mb", self.bucket_mb)
        check_goal(self.seconds, self.until_loss)
        if not 0 <= self.seed < 2**63:
            raise LabError(f"--seed {self.seed}: a seed is between 0 and 2**63 - 1. Use --seed 0.")
        if self.model not in MODELS:
            raise LabError(f"--model {self.model}: the lab has {' and '.join(MODELS)}. Use --model gpt.")
        if self.model == "gpt":
            _heads_divide(self.width, self.heads)
        elif self.data is not None:
            raise LabError(
                f"--model {self.model} --data {self.data}: the ResNet trains on the digits that it brings, "
                "not on text. Leave out --data, or use --model gpt."
            )

    @property
    def goal(self) -> Goal:
        """When the run has done enough. The learning rate follows the steps, whatever ends the run."""
        return Goal(self.steps, self.seconds, self.until_loss)


def check_goal(seconds: float | None, until_loss: float | None) -> None:
    """Refuses what no run could reach."""
    if seconds is not None:
        _positive("seconds", seconds)
    if until_loss is not None:
        _positive("until-loss", until_loss)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise LabError(f"--{name} {value}: there must be at least 1. Use --{name} 1 or more.")


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise LabError(f"--{name} {value:g}: it must be a number above 0. Leave it out for the default.")


def _heads_divide(width: int, heads: int) -> None:
    if width % heads or (width // heads) % 2:
        fitting = [h for h in range(1, width // 2 + 1) if width % h == 0 and (width // h) % 2 == 0]
        hint = f"Heads that fit {width}: {', '.join(map(str, fitting))}." if fitting else "Use an even --width."
        raise LabError(
            f"--width {width} --heads {heads}: each head gets width / heads numbers, and that must be a "
            f"whole, even number. {hint}"
        )


def usable_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_workers(workers: int, cores: int) -> None:
    """Refuses a number of workers that would only make the machine crawl.

    >>> check_workers(workers=16, cores=2)
    >>> check_workers(workers=500, cores=2)
    Traceback (most recent call last):
    laconic.compare.settings.LabError: --workers 500: this machine has 2 usable cores, and ...
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
    """Where this process stands among workers that a launcher such as torchrun has already started."""

    worker: int
    workers: int


def found_place(environ: Mapping[str, str]) -> Place | None:
    """The place that torchrun's variables give this process, or None if nothing started it as a worker.

    >>> found_place({"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    Place(worker=2, workers=4)
    >>> found_place({"RANK": "2"}) is None
    True
    """
    if not all(name in environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    return Place(worker=int(environ["RANK"]), workers=int(environ["WORLD_SIZE"]))
