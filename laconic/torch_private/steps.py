"""Steps of optimizers: whether torch calls their hooks, which of them are running, and when a GradScaler calls them.

torch wraps `step` in every class of which an instance was made. So a `step` that calls `super().step()` may run through
two wrappers, and the step hooks fire in both. It depends on the instances that this process has made before, and may
differ between workers.

A GradScaler looks for `_step_supports_amp_scaling` of the optimizer, and writes `found_inf` and `grad_scale`.
Frameworks read that flag, too, and refuse to clip: Lightning raises, with and without a GradScaler. So `always_call`
sets it only while `GradScaler.step` runs.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from inspect import unwrap
from types import FrameType
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

_FLAG = "_step_supports_amp_scaling"
_ALWAYS = "_laconic_always_steps"
"""Set on an optimizer whose step is always called: a wrapper that passes attributes on shows it, too."""
_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_replaced: list[Callable[..., Any]] = []
"""torch's `GradScaler.step`, while ours is in its place."""
_WRAPPER = Optimizer.profile_hook_step(lambda self: None).__code__

# Hooks, and steps inside one another


def runs_hooks(optimizer: object) -> bool:
    """Return whether torch calls step hooks of this optimizer: it has run `Optimizer.__init__`, and is no proxy."""
    hooked = getattr(getattr(type(optimizer), "step", None), "hooked", False)
    return isinstance(optimizer, Optimizer) and bool(hooked) and "_optimizer_step_pre_hooks" in vars(optimizer)


def running_steps() -> Iterator[Optimizer]:
    """Yield the optimizers whose `step` is running in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _WRAPPER:
            yield frame.f_locals["self"]
        frame = frame.f_back


def is_nested_step(optimizer: Optimizer) -> bool:
    """Return, in a step hook of `optimizer`, whether an outer `step` of the same optimizer is running."""
    return sum(each is optimizer for each in running_steps()) > 1


def may_nest(optimizer: Optimizer) -> bool:
    """Return whether a step of this optimizer may run inside another of it, where its class calls `super().step()`.

    torch wraps `step` in every class of which an instance was made, and the step hooks fire in each wrapper. A class
    that inherits its step, such as AdamW from Adam, has a wrapper of its own around the same function.
    """
    kinds = (kind for kind in type(optimizer).__mro__ if kind is not Optimizer and "step" in vars(kind))
    return len({unwrap(vars(kind)["step"]) for kind in kinds}) > 1


# What a GradScaler writes


def skips_itself(optimizer: Optimizer) -> bool:
    """Return whether an optimizer skips a step where a tensor says so, as fused ones do: they unscale, too."""
    return bool(getattr(optimizer, _FLAG, False))


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


def scale_of(scaler: GradScaler) -> Tensor | None:
    """Return the loss scale, 0-d on its device, which `update` changes in place; None before the first `scale`.

    `get_scale` would wait for the device.
    """
    scale: Tensor | None = scaler._scale
    return scale


def always_call(optimizer: Optimizer) -> None:
    """Let every GradScaler call the step of this optimizer, with `found_inf` and `grad_scale` set, if it overflows."""
    if not _optimizers and not _replaced:
        _replaced.append(GradScaler.step)
        GradScaler.step = functools.wraps(GradScaler.step)(_step)  # type: ignore[method-assign]
    _optimizers.add(optimizer)
    setattr(optimizer, _ALWAYS, True)


def call_as_before(optimizer: Optimizer) -> None:
    """Take `always_call` back."""
    vars(optimizer).pop(_ALWAYS, None)
    _optimizers.discard(optimizer)
    if not _optimizers and getattr(GradScaler.step, "__wrapped__", None) in _replaced:
        GradScaler.step = _replaced.pop()  # type: ignore[method-assign]


def _step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    if not getattr(optimizer, _ALWAYS, False) or skips_itself(optimizer):
        return _replaced[0](self, optimizer, *args, **kwargs)
    setattr(optimizer, _FLAG, True)
    try:
        return _replaced[0](self, optimizer, *args, **kwargs)
    finally:
        delattr(optimizer, _FLAG)
