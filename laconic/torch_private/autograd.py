"""Autograd: the backward that is running, and a callback at its end. FSDP itself uses both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable


def backward_id() -> int:
    """Return the id of the backward pass that is running in this thread, or -1."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that is running ends."""
    Variable._execution_engine.queue_callback(callback)
