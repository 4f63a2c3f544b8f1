"""Modules: all parameters and buffers in one quick walk, and the DDP models that hold given parameters.

`named_parameters()` takes five times as long, and the session walks at every synchronisation.
"""

from __future__ import annotations

import gc
from collections.abc import Collection

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


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

    A module does not know that DDP wraps it, so all objects are searched: some 50 ms for a million of them.
    """
    found = _ddp_models_of(parameters)
    if found:  # some may be garbage
        found.clear()
        gc.collect()
        found = _ddp_models_of(parameters)
    return found


def _ddp_models_of(parameters: Collection[int]) -> list[DistributedDataParallel]:
    # type() instead of isinstance(): a lazy module or a proxy may do anything when it is asked for its class.
    models = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return [each for each in models if any(id(p) in parameters for p in tensors_of(each)[0])]
