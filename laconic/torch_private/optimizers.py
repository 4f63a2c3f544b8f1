"""Optimizers: whether torch calls their hooks, and which steps are running.

torch wraps `step` of every class of which an instance was made. So a `step` that calls `super().step()` may run through
two wrappers, and the step hooks fire in both. It depends on the instances that this process has made before, and may
differ between workers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from torch.optim import Optimizer

_WRAPPER = Optimizer.profile_hook_step(lambda self: None).__code__


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
