"""Look through what frameworks put around a model and its optimizer.

A wrapper of a model is known by its class: torch.compile's and Fabric's. One that is not known, and that hides a
DistributedDataParallel, is refused (`wrapping.py`). A wrapper of an optimizer is known by what it lacks: torch calls
the hooks of a step only for optimizers that have run `Optimizer.__init__`, and those of accelerate, Lightning and
Fabric have not. They pass each step on to the one optimizer that they hold.
"""

from __future__ import annotations

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from laconic.plans.plan import Plan
from laconic.torch_private.optimizers import runs_hooks

_INSIDE = {"OptimizedModule": "_orig_mod", "_FabricModule": "_forward_module"}
"""Wrappers of models: the class, and where it keeps the model."""
_MOVES_WEIGHTS = ("ScheduleFreeWrapper", "ScheduleFreeWrapperReference")
"""Wrappers that change weights after the step of the optimizer inside."""


def model_inside(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of torch.compile and Fabric."""
    while (place := _INSIDE.get(type(model).__name__)) is not None:
        model = getattr(model, place)
    return model


def optimizer_inside(optimizer: object) -> object:
    """Return the torch optimizer that a wrapper passes its steps on to; another object as it is."""
    while hasattr(optimizer, "param_groups") and not runs_hooks(optimizer):
        held = [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]
        if len(held) != 1:
            break
        optimizer = held[0]
    return optimizer


def scaler_of(wrapper: object) -> GradScaler | None:
    """Return the GradScaler with which accelerate's wrapper steps; None for another object."""
    found = None if runs_hooks(wrapper) else getattr(wrapper, "scaler", None)
    return found if isinstance(found, GradScaler) else None


def report_step(wrapper: object, skipped: bool) -> None:
    """Tell accelerate's wrapper whether the step was skipped; its schedulers do not step then.

    It takes a step for skipped that its GradScaler does not call, and under laconic the GradScaler calls each step.
    """
    if hasattr(wrapper, "_is_overflow"):
        wrapper._is_overflow = skipped
        if skipped:
            wrapper._accelerate_step_called = False  # type: ignore[attr-defined]


def check_wrapper(optimizer: object, plan: Plan) -> None:
    """Refuse plans that average weights under a wrapper that changes them after the step of the optimizer inside."""
    name = type(optimizer).__name__
    if plan.local and name in _MOVES_WEIGHTS:
        raise ValueError(
            f"attach({plan!r}, model, {name}): this wrapper changes the weights after the step of the optimizer "
            "inside, so weights that are averaged then do not stay equal. Use a plan that averages gradients, such as "
            "power_sgd(), or an optimizer that needs no wrapper, such as schedulefree.AdamWScheduleFree."
        )
