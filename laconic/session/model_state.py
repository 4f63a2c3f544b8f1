"""One worker's copy of the model by name, and what the codecs keep for it.

The model is looked up again at every synchronisation: code of the user's may rebind `p.data`, replace a buffer,
unfreeze parameters, or add modules.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from laconic.checks.agreement import Facts, parameter_facts
from laconic.checks.divergence import differences
from laconic.comm.averaging import write
from laconic.comm.queue import CollectiveQueue
from laconic.exchange import Exchange, First, State
from laconic.packing import bucketed, pack, unpack
from laconic.session.carry_over import carry_gradients
from laconic.torch_private.modules import tensors_of


class ModelState:
    """Parameters and buffers by name, and the state of the codecs and of the outer step.

    `params` are the tensors that are averaged: those of parameters that are trained, or were since the last round. Of a
    sharded parameter it is this worker's shard, of a complex one a real view. `originals` are the parameters as the
    model and the optimizers know them. `refresh` replaces all of them: nobody keeps them across steps.
    """

    def __init__(self, model: nn.Module, sharded: bool = False) -> None:
        self._model = model
        self._sharded = sharded
        """Whether FSDP2 shards the model. It exchanges the parameters of its modules: they are looked up only once."""
        self._seen: object = None
        self.originals: dict[str, nn.Parameter] = {}
        self.params: dict[str, Tensor] = {}
        self.all_buffers: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.nonfinite_by_design: set[str] = set()
        """Buffers that held NaN or Inf when they were first seen, such as masks with -inf."""
        self.name_of: dict[int, str] = {}
        self.devices: dict[str, torch.device] = {}
        self.facts = Facts({})
        """What all workers must have in common: names, shapes and dtypes of what is averaged, and `state_also`."""
        self._also: dict[str, object] = {}
        self.unsynced: set[str] = set()
        """Parameters that came after `attach`, and that may differ between workers still."""
        self.state: dict[str, State] = {}
        """What codecs keep between exchanges of gradients and of weights, and what the outer step keeps."""
        self.reset()
        self.refresh()
        self.unsynced.clear()

    def reset(self, carry: bool = False) -> None:
        """Drop all state; with `carry`, not the residuals of gradients, and the loss scale that they are in."""
        if carry:
            kept = {key: self.state[key] for key in ("loss_scale",) if key in self.state}
            self.state = {"gradient": carry_gradients(self.state["gradient"]), "weights": {}, "outer": {}, **kept}
        else:
            self.state = {"gradient": {}, "weights": {}, "outer": {}}

    def refresh(self) -> None:
        """Look the model up again, if a tensor, its memory, or what is trained has changed."""
        if self._sharded and self.originals:
            self.params = {name: local_of(p) for name, p in self.originals.items()}
            return
        params, buffers = tensors_of(self._model)
        seen = [(id(p), p.requires_grad, p.shape, _address(p)) for p in params]
        seen += [(id(b), False, b.shape, _address(b)) for b in buffers]
        if seen != self._seen:
            self._seen = seen
            self._look_up({id(p) for p in self.originals.values()} | {id(p) for p in params if p.requires_grad})

    def _look_up(self, trained: Collection[int]) -> None:
        before, devices = self.originals, self.devices
        self.originals = {name: p for name, p in _by_name(self._model.named_parameters()).items() if id(p) in trained}
        self.params = {name: local_of(p) for name, p in self.originals.items()}
        known, buffers = self.buffers, _by_name(self._model.named_buffers())
        self.all_buffers = {f"buffer:{name}": local_of(b) for name, b in buffers.items()}
        self.buffers = {name: b for name, b in self.all_buffers.items() if b.is_floating_point()}
        new_buffers = {name: b for name, b in self.buffers.items() if name not in known}
        self.nonfinite_by_design |= {name for name, b in new_buffers.items() if not bool(b.isfinite().all())}
        self.name_of = {id(p): name for name, p in self.originals.items()}
        self.devices = {name: p.device for name, p in self.params.items()}
        self._state_facts()
        new = {name for name, p in self.originals.items() if before.get(name) is not p}
        self.unsynced |= new
        gone = new | (before.keys() - self.originals.keys())
        if any(name in before for name in gone):  # what was kept for another parameter of that name
            self.state = without(self.state, gone)
        if any(devices.get(name, device) != device for name, device in self.devices.items()):
            self.state = copied(self.state, self.devices)

    def _state_facts(self) -> None:
        shown = parameter_facts(self.originals.items()) | parameter_facts(self.all_buffers.items(), "buffer")
        self.facts = Facts(shown | self._also)

    def state_also(self, facts: Mapping[str, object]) -> None:
        """Count these among the facts that all workers must have in common."""
        self._also = dict(facts)
        self._state_facts()

    def all_names(self) -> dict[int, str]:
        """Return the names of all parameters by their ids, also of those that are not trained."""
        return {id(p): name for name, p in _by_name(self._model.named_parameters()).items()}

    def everything(self) -> dict[str, Tensor]:
        """Return all parameters, also those that are not trained, and all buffers."""
        return {name: local_of(p) for name, p in _by_name(self._model.named_parameters()).items()} | self.all_buffers

    def of_first_worker(self, queue: CollectiveQueue, names: Iterable[str]) -> None:
        """Give every worker the first worker's tensors of these names."""
        tensors = self.everything()
        buckets = bucketed({name: tensors[name] for name in names})
        queue.run_all([_taken(bucket) for bucket in buckets], "control")

    def sync_new(self, queue: CollectiveQueue, among_all: bool) -> None:
        """Give every worker the first worker's values of parameters that came after `attach`."""
        if self.unsynced:
            new = {name: p for name, p in self.params.items() if name in self.unsynced}
            self.of_first_worker(queue, differences(queue, new))
            if among_all:
                self.unsynced.clear()

    def mark_synced(self, names: Iterable[str]) -> None:
        """Note that these parameters are equal on all workers. Those that are frozen are not averaged any more."""
        self.unsynced.difference_update(names)
        frozen = {name for name in names if not self.originals[name].requires_grad}
        if frozen and not self._sharded:
            self._look_up({id(p) for name, p in self.originals.items() if name not in frozen})

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradient of each parameter, in an order that all workers share."""
        return {name: None if p.grad is None else local_of(p.grad) for name, p in self.originals.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the codecs and of the outer step, without caches."""
        frozen = [name for name, p in self.originals.items() if not p.requires_grad]  # averaged once more
        return {"state": _without_caches(self.state)} | ({"frozen": frozen} if frozen else {})

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        frozen = set(saved.get("frozen", ()))
        if frozen and not self._sharded:
            named = _by_name(self._model.named_parameters())
            self._look_up({id(p) for name, p in named.items() if name in self.originals or name in frozen})
            self.unsynced -= frozen
        self.state = copied(saved["state"], self.devices)


def of_worker(tensors: Mapping[str, Tensor], worker: int = 0) -> Exchange[dict[str, Tensor]]:
    """Return one worker's tensors, of one dtype and device, on all workers."""
    return unpack((yield First(pack(tensors), worker)), like=tensors)


def _taken(tensors: Mapping[str, Tensor]) -> Exchange[None]:
    write(tensors, (yield from of_worker(tensors)))


def local_of(t: Tensor) -> Tensor:
    """Return what is averaged of a tensor: the shard of a DTensor, a real view of a complex one, or the tensor."""
    sharding = sys.modules.get("torch.distributed.tensor")  # slow to import; loaded wherever a DTensor exists
    local = (t.to_local() if sharding is not None and isinstance(t, sharding.DTensor) else t).detach()
    return torch.view_as_real(local) if local.is_complex() else local


def _address(t: Tensor) -> int:
    if type(t) not in (Tensor, nn.Parameter):
        t = local_of(t)
    return t.data_ptr() if t.layout is torch.strided else 0


_Named = TypeVar("_Named", bound=Tensor)


def _by_name(named: Iterable[tuple[str, _Named]]) -> dict[str, _Named]:
    """Key tensors by their clean names; by their full names, should two clean ones be the same."""
    given = dict(named)
    cleaned = {clean(name): t for name, t in given.items()}
    return cleaned if len(cleaned) == len(given) else given


def clean(name: str) -> str:
    """Remove what torch.compile puts into a parameter's name.

    >>> clean("_orig_mod.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return name.replace("_orig_mod.", "")


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


def same_tensors(tree: Any) -> Any:
    """Copy a tree of dicts, but not the tensors in it."""
    return {key: same_tensors(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


def without(tree: Any, names: Iterable[str]) -> Any:
    """Copy a tree of dicts without the keys `names`, at any depth, and without caches."""
    if isinstance(tree, Mapping):
        return {key: without(value, names) for key, value in _without_caches(tree).items() if key not in names}
    return tree


def _without_caches(tree: Any) -> Any:
    """Leave out keys that begin with an underscore: caches that are made again."""
    if isinstance(tree, Mapping):
        return {key: _without_caches(value) for key, value in tree.items() if not key.startswith("_")}
    return tree
