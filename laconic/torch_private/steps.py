"""Steps of optimizers: what a GradScaler writes on an optimizer, and which steps can run inside one another.

A GradScaler looks for `_step_supports_amp_scaling`, and writes `found_inf` and `grad_scale`.
"""

from __future__ import annotations

from inspect import unwrap

from torch import Tensor
from torch.optim import Optimizer

FLAG = "_step_supports_amp_scaling"


def skips_itself(optimizer: Optimizer) -> bool:
    """Return whether an optimizer skips a step where a tensor says so, as fused ones do: they unscale, too."""
    return bool(getattr(optimizer, FLAG, False))


def found_inf(optimizer: Optimizer) -> Tensor | None:
    """Return 1.0 if the step is to be skipped, else 0.0; None if nothing is known."""
    return getattr(optimizer, "found_inf", None)


def set_found_inf(optimizer: Optimizer, flag: Tensor | None) -> None:
    """Set whether the step is to be skipped."""
    optimizer.found_inf = flag  # type: ignore[attr-defined]


def loss_scale(optimizer: Optimizer) -> Tensor | None:
    """Return the loss scale that the gradients are still multiplied by; None if there is none."""
    return getattr(optimizer, "grad_scale", None)


def clear_loss_scale(optimizer: Optimizer) -> None:
    """Note that the gradients are unscaled."""
    optimizer.grad_scale = None  # type: ignore[attr-defined]


def forget_scaling(optimizer: Optimizer) -> None:
    """Remove what a GradScaler has written."""
    for name in ("found_inf", "grad_scale"):
        vars(optimizer).pop(name, None)


def may_nest(optimizer: Optimizer) -> bool:
    """Return whether a step of this optimizer may run inside another of it, where its class calls `super().step()`.

    torch wraps `step` in every class of which an instance was made, and the step hooks fire in each wrapper. A class
    that inherits its step, such as AdamW from Adam, has a wrapper of its own around the same function.
    """
    kinds = (kind for kind in type(optimizer).__mro__ if kind is not Optimizer and "step" in vars(kind))
    return len({unwrap(vars(kind)["step"]) for kind in kinds}) > 1
