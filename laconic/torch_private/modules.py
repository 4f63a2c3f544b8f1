"""Models: all parameters and buffers in one quick walk, the DDP models that hold given parameters, the model inside a
compiled one, and the backward that is running.

`named_parameters()` takes five times as long as `tensors_of`, and the session walks at every synchronisation.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

_COMPILED = "_orig_mod"


def tensors_of(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return all parameters and all buffers, as they are registered now; shared ones more than once."""
    params: list[Tensor | None] = []
    buffers: list[Tensor | None] = []
    modules: list[nn.Module | None] = [model]
    while modules:
        module = modules.pop()
        if module is not None:
            params.extend(module._parameters.values())
            buffers.extend(module._buffers.values())
            modules.extend(module._modules.values())
    return [p for p in params if p is not None], [b for b in buffers if b is not None]


def ddp_models_of(parameters: Collection[int]) -> list[DistributedDataParallel]:
    """Find the DDP models in this process that hold one of these parameters, given by their ids.

    A module does not know that DDP wraps it. But an object refers to its class, and the garbage collector finds who
    refers to one: some 20 ms in a process of 300,000 objects.
    """
    found = _ddp_models_of(parameters)
    if found:  # some may be garbage
        found.clear()
        gc.collect()
        found = _ddp_models_of(parameters)
    return found


def _ddp_models_of(parameters: Collection[int]) -> list[DistributedDataParallel]:
    kinds = _with_subclasses(DistributedDataParallel)
    models = [each for each in gc.get_referrers(*kinds) if type(each) in kinds]
    return [each for each in models if any(id(p) in parameters for p in tensors_of(each)[0])]


def _with_subclasses(kind: type) -> set[type]:
    derived: list[type] = kind.__subclasses__()
    return {kind}.union(*map(_with_subclasses, derived))


def inside_compiled(model: nn.Module) -> nn.Module | None:
    """Return the model inside one of torch.compile; None for another model."""
    return getattr(model, _COMPILED) if type(model).__name__ == "OptimizedModule" else None


def clean(name: str) -> str:
    """Remove what torch.compile puts into a parameter's name.

    >>> clean("_orig_mod.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return name.replace(f"{_COMPILED}.", "")


def backward_id() -> int:
    """Return the id of the backward pass that is running in this thread, or -1. FSDP itself uses it."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that is running ends, as FSDP does."""
    Variable._execution_engine.queue_callback(callback)
