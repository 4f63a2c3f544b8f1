"""A task: a model, its batches and its loss. The training loop is the same for all tasks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laconic.tools.lab import digits, text
from laconic.tools.lab.models import GPT, ResNet
from laconic.tools.lab.settings import Lab

VALIDATION_BATCHES = 16
VALIDATION_SEQUENCES = 16  # in each of them
VALIDATION_SEED = 0  # the same batches for every --seed, so that runs with different seeds can be compared

Batch = tuple[Tensor, Tensor]  # inputs and targets


@dataclass(frozen=True)
class Task:
    """A new model, a function that returns the batch of (worker, step), and the validation batches of all workers."""

    model: nn.Module
    draw: Callable[[int, int], Batch]
    validation: tuple[Batch, ...]
    tokens_per_step: int  # of one worker; an image counts as one


def make_task(lab: Lab) -> Task:
    """Make the task that the lab trains. It reads the data."""
    return _digits_task(lab) if lab.model == "resnet" else _text_task(lab)


def check_data(lab: Lab) -> None:
    """Read the data once before any worker starts, so that a mistake gives one message."""
    if lab.model == "resnet":
        digits.load()
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
        model=GPT(s.layers, s.width, s.heads, s.seed),
        draw=lambda worker, step: text.batch(train, s.batch, s.context, (s.seed, worker, step)),
        validation=tuple(text.batch(validation, VALIDATION_SEQUENCES, s.context, seed) for seed in seeds),
        tokens_per_step=s.batch * s.context,
    )


def _digits_task(s: Lab) -> Task:
    train, validation = digits.load()
    return Task(
        model=ResNet(s.layers, s.width, s.seed),
        draw=lambda worker, step: digits.batch(train, s.batch, (s.seed, worker, step)),
        validation=(validation,),
        tokens_per_step=s.batch,
    )
