"""The settings of the lab's training, checked before any worker starts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from laconic.tools.errors import UsageError, check_count, check_positive
from laconic.tools.launch.workers import python
from laconic.values import is_whole

Guarding: TypeAlias = Literal["off", "warn", "act"]
MODELS = ("gpt", "resnet")
STEPS = 300
HEAD_WIDTH = 32


@dataclass(frozen=True)
class Lab:
    """A small model, its data and its optimizer: what the lab's script trains.

    The default is a training in which parallel work pays: batches are so small that noise rules, and four workers with
    `ddp()` need less than 1 / 2.5 of the steps that one needs (docs/log.md).

    >>> Lab(width=128).heads
    4
    >>> Lab(width=33)
    Traceback (most recent call last):
    laconic.tools.errors.UsageError: --width 33: ...
    """

    model: str = "gpt"
    layers: int = 4
    width: int = 128
    context: int = 64
    batch: int = 4
    lr: float = 5e-3
    seed: int = 0
    data: Path | None = None
    bucket_mb: float = 25.0
    guard: Guarding = "off"

    title = "the lab's training"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "context", "batch"):
            check_count(name, getattr(self, name))
        for name in ("lr", "bucket_mb"):
            check_positive(name, getattr(self, name))
        if not (is_whole(self.seed, least=0) and self.seed < 2**63):
            raise UsageError(f"--seed {self.seed}: a seed is between 0 and 2**63 - 1. Use --seed 0.")
        if self.guard not in get_args(Guarding):
            raise UsageError(
                f"--guard {self.guard}: it must be one of {', '.join(get_args(Guarding))}. Use --guard warn."
            )
        if self.model not in MODELS:
            raise UsageError(f"--model {self.model}: the lab has {' and '.join(MODELS)}. Use --model gpt.")
        if self.model == "gpt":
            if self.width % (2 * self.heads):
                raise UsageError(
                    f"--width {self.width}: a GPT of this width has {self.heads} heads, each of which needs an even "
                    f"width. Use a multiple of {2 * HEAD_WIDTH}."
                )
        elif self.data is not None:
            raise UsageError(
                f"--model {self.model} --data {self.data}: the ResNet trains on scikit-learn's digits, not on text. "
                "Leave out --data, or use --model gpt."
            )

    @property
    def heads(self) -> int:
        """The attention heads of the GPT."""
        return max(1, self.width // HEAD_WIDTH)

    @property
    def name(self) -> str:
        """What results call the training."""
        return self.model

    def arguments(self, steps: int | None) -> list[str]:
        """The arguments of the lab's script. The learning rate follows the steps."""
        given = {each.name: getattr(self, each.name) for each in fields(self)} | {"steps": steps}
        return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]

    def command(self, steps: int | None) -> list[str]:
        """The command of a worker."""
        return python("-m", "laconic.tools.lab.script", *self.arguments(steps))
