"""A task: a model and the batches that it learns from.

This is where a model meets its data. The rest of the lab sees only a module, a way to draw batches and a
loss, so the loop that trains a GPT on text is the loop that trains a ResNet on digits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laconic.compare import digits, text
from laconic.compare.lab.models import GPTShape, ResNetShape
from laconic.compare.settings import Settings

VALIDATION_BATCHES = 16
VALIDATION_SEED = 0  # the same batches whatever --seed, so runs with different seeds can be compared

Batch = tuple[Tensor, Tensor]  # what goes in, what should come out


@dataclass(frozen=True)
class Task:
    """A fresh model, batches by (worker, step), and the batches that every worker validates on."""

    model: nn.Module
    draw: Callable[[int, int], Batch]
    validation: tuple[Batch, ...]
    tokens_per_step: int  # on one worker; an image counts as one


def make_task(settings: Settings) -> Task:
    """The task that the settings describe. Reads the data, so a wrong path shows here."""
    return _digits_task(settings) if settings.model == "resnet" else _text_task(settings)


def check_data(settings: Settings) -> None:
    """Reads the data once before any worker starts, so that a mistake costs one message."""
    if settings.model == "resnet":
        digits.load()
    else:
        text.load(settings.data, settings.context)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy in nats: of the next byte, or of the digit."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, batches: Sequence[Batch]) -> float:
    """The mean loss of `model` over `batches`, as it would be used: without training it."""
    model.eval()
    loss = torch.stack([loss_of(model, batch) for batch in batches]).mean().item()
    model.train()
    return loss


def _text_task(s: Settings) -> Task:
    data = text.load(s.data, s.context)
    return Task(
        model=GPTShape(s.layers, s.width, s.heads, s.context).build(s.seed),
        draw=lambda worker, step: text.batch(data.train, s.batch, s.context, (s.seed, worker, step)),
        validation=tuple(
            text.batch(data.validation, s.batch, s.context, (VALIDATION_SEED, index))
            for index in range(VALIDATION_BATCHES)
        ),
        tokens_per_step=s.batch * s.context,
    )


def _digits_task(s: Settings) -> Task:
    train, validation = digits.load()
    return Task(
        model=ResNetShape(s.layers, s.width).build(s.seed),
        draw=lambda worker, step: digits.batch(train, s.batch, (s.seed, worker, step)),
        validation=((validation.images, validation.labels),),
        tokens_per_step=s.batch,
    )
