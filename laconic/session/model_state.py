"""One worker's copy of the model by name, and what the codecs keep for it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.comm.queue import CollectiveQueue
from laconic.comm.requests import State


class ModelState:
    """Parameters and buffers by name, and the state of the codecs and of the outer step.

    `params` are the tensors that are averaged: of a sharded parameter, this worker's shard. `originals` are the
    parameters as the model and the optimizers know them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.originals = {clean(name): p for name, p in model.named_parameters() if p.requires_grad}
        self.params = {name: local_of(p) for name, p in self.originals.items()}
        self.all_buffers = {f"buffer:{clean(name)}": local_of(b) for name, b in model.named_buffers()}
        self.buffers = {name: b for name, b in self.all_buffers.items() if b.is_floating_point()}
        self.name_of = {id(p): name for name, p in self.originals.items()}
        self.devices = {name: p.device for name, p in self.params.items()}
        self.state: dict[str, State] = {}
        """What codecs keep between exchanges of gradients and of weights, and what the outer step keeps."""
        self.reset()

    def reset(self) -> None:
        """Drop all state."""
        self.state = {"gradient": {}, "weights": {}, "outer": {}}

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradient of each parameter, in an order that all workers share."""
        return {name: None if p.grad is None else local_of(p.grad) for name, p in self.originals.items()}

    def broadcast(self, queue: CollectiveQueue) -> None:
        """Give every worker the weights and buffers of the first, as DDP does when it is made."""
        if queue.workers == 1:
            return
        first = dist.get_process_group_ranks(queue.group)[0]
        with torch.no_grad():
            for t in (*self.params.values(), *self.all_buffers.values()):
                dense = t.contiguous()
                dist.broadcast(dense, src=first, group=queue.group)
                t.copy_(dense)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the codecs and of the outer step, without caches."""
        return {"state": _without_caches(self.state)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.state = copied(saved["state"], self.devices)


def local_of(t: Tensor) -> Tensor:
    """Return this worker's part of a tensor: the shard of a DTensor, and any other tensor itself."""
    sharding = sys.modules.get("torch.distributed.tensor")  # slow to import; loaded wherever a DTensor exists
    return (t.to_local() if sharding is not None and isinstance(t, sharding.DTensor) else t).detach()


def clean(name: str) -> str:
    """Remove what wrappers put into a parameter's name.

    >>> clean("module._orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    name = name.removeprefix("module.")
    return name.replace("_orig_mod.", "").removeprefix("module.")


def copied(tree: Any, devices: Mapping[str, torch.device] = MappingProxyType({})) -> Any:
    """Copy a tree of dicts and tensors, each tensor to the device of the parameter of its name."""
    if isinstance(tree, Mapping):
        return {
            key: value.to(devices.get(key, value.device), copy=True)
            if isinstance(value, Tensor)
            else copied(value, devices)
            for key, value in tree.items()
        }
    return tree


def _without_caches(tree: Any) -> Any:
    """Leave out keys that begin with an underscore: caches that are made again."""
    if isinstance(tree, Mapping):
        return {key: _without_caches(value) for key, value in tree.items() if not key.startswith("_")}
    return tree
