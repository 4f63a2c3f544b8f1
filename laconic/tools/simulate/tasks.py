"""What a simulated worker trains: the lab's models, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from laconic.tools.errors import UsageError
from laconic.tools.lab.settings import Lab
from laconic.tools.lab.tasks import loss_of, make_task, validation_loss
from laconic.tools.planner.shapes import users_function

Loss: TypeAlias = Callable[[nn.Module, int, int], Tensor]
"""Returns the loss of a model on the batch of (worker, step)."""


@dataclass(frozen=True, eq=False)
class SimulatedTask:
    """A new model, its training loss, and its validation loss if there is one."""

    model: nn.Module
    loss: Loss
    validation: Callable[[nn.Module], float] | None = None


def lab_task(settings: Lab) -> SimulatedTask:
    """Make the lab's task that the settings describe. It reads the data."""
    task = make_task(settings)
    return SimulatedTask(
        task.model,
        lambda model, worker, step: loss_of(model, task.draw(worker, step)),
        lambda model: validation_loss(model, task.validation),
    )


def user_task(place: str, seed: int) -> SimulatedTask:
    """Call `module:function()`, which returns a model and a function `loss(model, worker, step)`."""
    rule = "It is called without arguments, and returns (model, loss), where loss(model, worker, step) is a tensor."
    try:
        torch.manual_seed(seed)
        made = users_function(place)()
    except Exception as error:
        raise UsageError(f"--model {place}: {type(error).__name__}: {error}. {rule}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise UsageError(f"--model {place}: it returned {type(made).__name__}. {rule}")
    return SimulatedTask(*made)
