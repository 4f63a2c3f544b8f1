"""GradScaler: the loss scale as a tensor, and optimizers whose step it always calls.

Whether it does is decided by `_step_supports_amp_scaling` of the optimizer. Frameworks read that, too, and refuse to
clip: Lightning raises, with and without a GradScaler. So the flag is there only while `GradScaler.step` runs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from laconic.torch_private.steps import FLAG, skips_itself

_ALWAYS = "_laconic_always_steps"
"""Set on an optimizer whose step is always called: a wrapper that passes attributes on shows it, too."""
_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_replaced: list[Callable[..., Any]] = []
"""torch's `GradScaler.step`, while ours is in its place."""


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
    setattr(optimizer, FLAG, True)
    try:
        return _replaced[0](self, optimizer, *args, **kwargs)
    finally:
        delattr(optimizer, FLAG)
