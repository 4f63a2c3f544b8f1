"""The model that a probe measures: the lab's, or one that a user's function returns."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from laconic.tools.errors import UsageError
from laconic.tools.lab.script import parse
from laconic.tools.lab.tasks import loss_of, make_task
from laconic.tools.planner.probe_data import ModelShapes

RULE = (
    "The function takes no argument, and returns a torch.nn.Module, or a module and a function that computes the loss "
    "of its next batch"
)


@dataclass(frozen=True)
class ProbedModel:
    """A model, and a function that computes the loss of its next batch; without one, no step is measured."""

    name: str
    model: nn.Module
    loss: Callable[[], Tensor] | None

    @property
    def shapes(self) -> ModelShapes:
        """The shapes of the trained parameters."""
        trained = {name: tuple(p.shape) for name, p in self.model.named_parameters() if p.requires_grad}
        return ModelShapes(self.name, trained)


def load_model(name: str | None, lab: Sequence[str], worker: int, device: torch.device) -> ProbedModel:
    """Make the model of "module:function", or the lab's model by the arguments of its script, on this device."""
    return _lab_model(lab, worker, device) if name is None else _users_model(name, device)


def _lab_model(arguments: Sequence[str], worker: int, device: torch.device) -> ProbedModel:
    settings, _ = parse(arguments)
    task, steps = make_task(settings), count(1)
    model = task.model.to(device)

    def loss() -> Tensor:
        inputs, targets = task.draw(worker, next(steps))
        return loss_of(model, (inputs.to(device), targets.to(device)))

    return ProbedModel(f"the lab's {settings.model}", model, loss)


def _users_model(name: str, device: torch.device) -> ProbedModel:
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--model {name}: {error}. Write module:function. {RULE}.") from error
    with torch.device(device):
        made = factory()
    model, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not (loss is None or callable(loss)):
        raise UsageError(f"--model {name}: it returned {type(made).__name__}. {RULE}.")
    return ProbedModel(name, model.to(device), loss)
