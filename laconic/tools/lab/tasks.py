"""What the lab trains: its settings, and the task that they describe: a model, its batches and its loss.

The training loop is the same for all tasks (`script.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laconic.tools.errors import UsageError, check_count, check_positive
from laconic.tools.lab import text
from laconic.tools.lab.models import GPT, ResNet
from laconic.tools.launch.workers import python
from laconic.tools.machine import pip_install
from laconic.values import is_whole

Guarding: TypeAlias = Literal["off", "warn", "act"]
MODELS = ("gpt", "resnet")
STEPS = 300
HEAD_WIDTH = 32
VALIDATION_BATCHES = 16
VALIDATION_SEQUENCES = 16  # in each of them
VALIDATION_SEED = 0  # the same batches for every --seed, so that runs with different seeds can be compared
DIGITS_EVERY = 8  # of the digits, the one that is held out

Batch = tuple[Tensor, Tensor]  # inputs and targets


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


@dataclass(frozen=True)
class Task:
    """A new model, a function that returns the batch of (worker, step), and the validation batches of all workers."""

    model: nn.Module
    draw: Callable[[int, int], Batch]
    validation: tuple[Batch, ...]
    tokens_per_step: int  # of one worker; an image counts as one


def make_model(lab: Lab) -> nn.Module:
    """Make the model that the lab trains."""
    if lab.model == "resnet":
        return ResNet(lab.layers, lab.width, lab.seed)
    return GPT(lab.layers, lab.width, lab.heads, lab.seed)


def make_task(lab: Lab) -> Task:
    """Make the task that the lab trains. It reads the data."""
    return _digits_task(lab) if lab.model == "resnet" else _text_task(lab)


def check_data(lab: Lab) -> None:
    """Read the data once before any worker starts, so that a mistake gives one message."""
    if lab.model == "resnet":
        digits()
    else:
        text.load(lab.data, lab.context)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy, in nats, of the next byte or of the digit."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, batches: Sequence[Batch]) -> float:
    """The mean loss of `model` over `batches`, in evaluation mode."""
    model.eval()
    loss = torch.stack([loss_of(model, batch) for batch in batches]).mean().item()
    model.train()
    return loss


def _text_task(s: Lab) -> Task:
    train, validation = text.load(s.data, s.context)
    seeds = [(VALIDATION_SEED, index) for index in range(VALIDATION_BATCHES)]
    return Task(
        model=make_model(s),
        draw=lambda worker, step: text.batch(train, s.batch, s.context, (s.seed, worker, step)),
        validation=tuple(text.batch(validation, VALIDATION_SEQUENCES, s.context, seed) for seed in seeds),
        tokens_per_step=s.batch * s.context,
    )


def _digits_task(s: Lab) -> Task:
    (images, labels), validation = digits()

    def draw(worker: int, step: int) -> Batch:
        rows = torch.randint(len(labels), (s.batch,), generator=text.generator((s.seed, worker, step)))
        return images[rows], labels[rows]

    return Task(make_model(s), draw, (validation,), tokens_per_step=s.batch)


def digits() -> tuple[Batch, Batch]:
    """Load the 1,797 handwritten digits of scikit-learn for training, and every eighth for validation.

    Images [count, 1, 8, 8] have values from 0 to 1, labels [count].
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            f"--model resnet: its digits come with scikit-learn, which cannot be imported ({error}). "
            f"Install it with {pip_install('digits')}, or use --model gpt."
        ) from error
    found = load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 16
    labels = torch.from_numpy(found.target).long()
    held_out = torch.arange(len(labels)) % DIGITS_EVERY == 0
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])
