"""The model of this worker as it is now: parameters, buffers and moments by name, and what the codecs keep for it.

Two verbs work on its tensors: `average` them over the workers, and `take_from` one worker what all then have. The model
is looked up again at every synchronisation: code of the user's may rebind `p.data`, replace a
buffer, unfreeze parameters, add modules, or add parameters to an optimizer.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.checks.agreement import Facts, parameter_facts
from laconic.checks.digests import differences
from laconic.comm.averaging import average_in_place, write
from laconic.comm.groups import workers_on_this_machine
from laconic.comm.queue import CollectiveQueue
from laconic.cost import facts_of
from laconic.exchange import Exchange, First, Mean, Request, State, all_finite
from laconic.packing import bucketed, pack, unpack
from laconic.plans.schedules import Payload
from laconic.plans.targets import Kind, ModelFacts
from laconic.torch_private.foreach import multiply_all
from laconic.torch_private.modules import clean, tensors_of

logger = logging.getLogger(__name__)

Commit: TypeAlias = Literal["streaming", "atomic"]
"""Whether what workers synchronise takes effect bucket by bucket, or all at once at the end."""
Moments = Mapping[str, Mapping[str, Tensor]]
"""Of each parameter: its moments, as "moment:exp_avg:weight"."""


class LiveModel:
    """Parameters, buffers and moments by name, and the state of the codecs and of the outer step.

    `params` are the tensors that are averaged: those of parameters that are trained, or were since the last round. Of a
    sharded parameter it is this worker's shard, of a complex one a real view. `originals` are the parameters as the
    model and the optimizers know them. `refresh` replaces all of them: nobody keeps them across steps.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], sharded: bool = False) -> None:
        self.model, self.optimizers = model, list(optimizers)
        self.sharded = sharded
        """Whether FSDP2 shards the model. It swaps the parameters of its modules, so they are looked up only once."""
        self._seen: object = None
        self._sizes: list[int] = []
        """How many parameters each group of the optimizers held when they were looked up."""
        self._unknown = 0
        """How many parameters the optimizers hold that are not the model's."""
        self.originals: dict[str, nn.Parameter] = {}
        self.params: dict[str, Tensor] = {}
        self.all_buffers: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        """Those of floating point."""
        self.nonfinite_by_design: set[str] = set()
        """Buffers that held NaN or Inf when they were first seen, such as masks with -inf."""
        self.name_of: dict[int, str] = {}
        """The name of each of `originals`, by its id."""
        self.devices: dict[str, torch.device] = {}
        self.facts = Facts({})
        """What all workers must have in common: names, shapes and dtypes of what is averaged, and `held`."""
        self.held: dict[str, object] = {}
        """What each optimizer holds."""
        self.unsynced: set[str] = set()
        """Parameters that came after `attach`, and that may differ between workers still."""
        self.state: dict[str, State] = {}
        """What codecs keep between exchanges of gradients and of weights, and what the outer step keeps."""
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None
        """On a GPU: whether the buffers taken last were finite, read a step later, so that no step waits for it."""
        self.reset()
        self.refresh()
        self.unsynced.clear()
        self.refresh_held()

    # Looking the model up

    def refresh(self) -> None:
        """Look the model up again, if a tensor, its memory, or what is trained has changed."""
        if self.sharded and self.originals:
            self.params = {name: local_of(p) for name, p in self.originals.items()}
            return
        params, buffers = tensors_of(self.model)
        seen = [(id(p), p.requires_grad, p.shape, _address(p)) for p in params]
        seen += [(id(b), False, b.shape, _address(b)) for b in buffers]
        if seen != self._seen:
            self._seen = seen
            self._look_up({id(p) for p in self.originals.values()} | {id(p) for p in params if p.requires_grad})

    def _look_up(self, trained: Collection[int]) -> None:
        before, devices = self.originals, self.devices
        # 1. parameters
        self.originals = {name: p for name, p in _by_name(self.model.named_parameters()).items() if id(p) in trained}
        self.params = {name: local_of(p) for name, p in self.originals.items()}
        self.name_of = {id(p): name for name, p in self.originals.items()}
        self.devices = {name: p.device for name, p in self.params.items()}
        # 2. buffers
        known, buffers = self.buffers, _by_name(self.model.named_buffers())
        self.all_buffers = {f"buffer:{name}": local_of(b) for name, b in buffers.items()}
        self.buffers = {name: b for name, b in self.all_buffers.items() if b.is_floating_point()}
        new_buffers = {name: b for name, b in self.buffers.items() if name not in known}
        self.nonfinite_by_design |= {name for name, b in new_buffers.items() if not bool(b.isfinite().all())}
        self._state_facts()
        # 3. state: without that of another parameter of the same name, and on the devices of now
        new = {name for name, p in self.originals.items() if before.get(name) is not p}
        self.unsynced |= new
        gone = new | (before.keys() - self.originals.keys())
        if any(name in before for name in gone):
            self.state = without(self.state, gone)
        if any(devices.get(name, device) != device for name, device in self.devices.items()):
            self.state = copied(self.state, self.devices)

    def _state_facts(self) -> None:
        shown = parameter_facts(self.originals.items()) | parameter_facts(self.all_buffers.items(), "buffer")
        self.facts = Facts(shown | self.held)

    def refresh_held(self) -> None:
        """Look up what the optimizers hold, if a group was added or has grown (`optimizer.add_param_group`)."""
        sizes = [len(group["params"]) for each in self.optimizers for group in each.param_groups]
        if sizes == self._sizes:
            return
        self._sizes = sizes
        self.refresh()
        names, unknown = {id(p): name for name, p in _by_name(self.model.named_parameters()).items()}, 0
        for index, each in enumerate(self.optimizers):
            held = [names.get(id(p), "?") for group in each.param_groups for p in group["params"]]
            unknown += held.count("?")
            self.held[f"optimizer {index}"] = f"{type(each).__name__} of {', '.join(held)}"
        self._state_facts()
        if unknown > self._unknown:
            logger.warning(
                "the optimizer holds %d parameters that are not the model's: they are not averaged, and differ between "
                "the workers. Make them part of the model that attach is given.",
                unknown,
            )
        self._unknown = unknown

    def everything(self) -> dict[str, Tensor]:
        """Return all parameters, also those that are not trained, and all buffers.

        Of a tensor subclass, such as torchao's quantised weights, the dense tensors of which it is made.
        """
        parts = [parts_of(name, local_of(p)) for name, p in _by_name(self.model.named_parameters()).items()]
        return {name: t for each in parts for name, t in each.items()} | self.all_buffers

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradient of each parameter, in an order that all workers share; sparse ones as dense ones."""
        grads = {name: p.grad for name, p in self.originals.items()}
        dense = {name: g.to_dense() if g is not None and g.is_sparse else g for name, g in grads.items()}
        return {name: None if g is None else local_of(g) for name, g in dense.items()}

    # Moments of the optimizers

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return this worker's moments by parameter: what has its shape."""
        found: dict[str, dict[str, Tensor]] = {name: {} for name in self.originals}
        for name, p in self.originals.items():
            for optimizer in self.optimizers:
                state = optimizer.state.get(p, {})
                like = {k: local_of(t) for k, t in state.items() if isinstance(t, Tensor) and t.shape == p.shape}
                found[name] |= {f"moment:{k}:{name}": t for k, t in like.items() if t.is_floating_point()}
        return found

    def common_moments(self, queue: CollectiveQueue, moments: Moments, reset_others: bool = False) -> dict[str, Tensor]:
        """Return the moments of parameters that have them on every worker; perhaps drop the state of the others."""
        here = torch.tensor([float(bool(moments[name])) for name in moments])  # [parameters]: 1 where there are any
        if queue.workers > 1 and len(moments):
            here = queue.run(_mean(here.to(queue.device)), "control")
        everywhere = [name for name, share in zip(moments, here.tolist(), strict=True) if share == 1]
        if reset_others:
            self.reset_optimizers(moments.keys() - set(everywhere))
        return flat({name: moments[name] for name in everywhere})

    def equal_counters(self, queue: CollectiveQueue) -> None:
        """Set counters in the optimizers' state, such as Adam's steps, to the largest. Every worker has all of them."""
        params = [p for p in self.originals.values() if p.dim()]
        states = [optimizer.state.get(p, {}) for p in params for optimizer in self.optimizers]
        counters = [t for state in states for t in state.values() if isinstance(t, Tensor) and t.dim() == 0]
        if counters:
            rows = queue.gather(torch.tensor([float(t) for t in counters], dtype=torch.float64))  # [workers, counters]
            for t, value in zip(counters, rows.amax(0).tolist(), strict=True):
                t.fill_(value)

    def reset_optimizers(self, names: Iterable[str]) -> None:
        """Drop the optimizer state of these parameters."""
        for name in names:
            for optimizer in self.optimizers:
                if self.originals[name] in optimizer.state:
                    optimizer.state[self.originals[name]].clear()

    # The three verbs

    def average(
        self,
        queue: CollectiveQueue,
        tensors: Mapping[str, Tensor],
        commit: Commit,
        shares: tuple[float, ...] | None,
        scale: float,
    ) -> None:
        """Replace tensors by `scale` times their exact mean over the workers, weighted by their `shares` if given."""
        if commit == "atomic":
            _run(queue, tensors, lambda flat: Mean(flat, wide=True, shares=shares), Payload.WEIGHTS, commit)
        else:
            average_in_place(queue, tensors, Payload.WEIGHTS, shares=shares)
        if scale != 1 and tensors:
            multiply_all(list(tensors.values()), scale)

    def take_from(
        self,
        worker: int,
        queue: CollectiveQueue,
        tensors: Mapping[str, Tensor],
        phase: str = "control",
        commit: Commit = "streaming",
    ) -> None:
        """Replace tensors by those of one worker."""
        _run(queue, tensors, lambda flat: First(flat, worker), phase, commit)

    # What is done with them

    def sync_new(self, queue: CollectiveQueue, among_all: bool) -> None:
        """Give every worker the first worker's values of parameters that came after `attach`."""
        if self.unsynced:
            new = {name: p for name, p in self.params.items() if name in self.unsynced}
            self.take_from(0, queue, {name: new[name] for name in differences(queue, new)})
            if among_all:
                self.unsynced.clear()

    def mark_synced(self, names: Iterable[str]) -> None:
        """Note that these parameters are equal on all workers. Those that are frozen are not averaged any more."""
        self.unsynced.difference_update(names)
        frozen = {name for name in names if not self.originals[name].requires_grad}
        if frozen and not self.sharded:
            self._look_up({id(p) for name, p in self.originals.items() if name not in frozen})

    def take_first_buffers(self, queue: CollectiveQueue, step: int, ignored: Collection[str]) -> None:
        """Give all workers the first worker's buffers, as DDP does: after each step in which all averaged gradients.

        DDP itself broadcasts before the next forward, on a group of its own: no timeout of ours applies to that wait,
        and its bytes are not in the ledger. NaN and Inf do not spread: with its buffers, the first worker sends a flag,
        whether they are finite; if they are not, all take those of the first worker whose buffers are.
        """
        # `data`: as with DDP's own broadcast, autograd does not count it as a change of what a graph has saved.
        buffers = {name: b.data for name, b in self.all_buffers.items() if b.numel() and name not in ignored}
        if queue.workers == 1 or not buffers:
            return
        if self._pending is not None:
            finite, ready = self._pending
            self._pending = None
            ready.synchronize()
            if not bool(finite):
                self._take_first_finite_buffers(queue, buffers, step - 1)
        finite = self._take_buffers(queue, buffers, worker=0)
        if finite.is_cuda:
            host = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(finite, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
            self._pending = host, ready
        elif not bool(finite):
            self._take_first_finite_buffers(queue, buffers, step)

    def _take_first_finite_buffers(self, queue: CollectiveQueue, buffers: Mapping[str, Tensor], step: int) -> None:
        finite: list[bool] = queue.gather(self._buffers_finite(buffers).reshape(1)).flatten().tolist()
        text = f"step {step}: the buffers of worker 0 have NaN or Inf"
        if any(finite):
            logger.warning("%s. All workers take those of worker %d.", text, finite.index(True))
            self._take_buffers(queue, buffers, finite.index(True))
        else:
            logger.warning("%s, and so have those of all others. All keep their own.", text)

    def _take_buffers(self, queue: CollectiveQueue, buffers: Mapping[str, Tensor], worker: int) -> Tensor:
        """Take the buffers of `worker`, unless its flag is that they are not finite; return the flag."""
        buckets = bucketed(buffers)
        flats = [pack(bucket) for bucket in buckets]
        finite = self._buffers_finite(buffers).reshape(1).to(queue.device)

        def exchange(index: int) -> Exchange[None]:
            message = flats[index].view(torch.uint8).to(queue.device)
            if index == 0:  # the flag is the last byte of the first message
                message = torch.cat([message, finite.view(torch.uint8)])
            got = yield First(message, worker)
            if index == 0:
                finite.copy_(got[-1:])
                got = got[:-1]
            flats[index] = got.view(flats[index].dtype).to(flats[index].device)

        queue.run_all([exchange(index) for index in range(len(buckets))], "buffers")
        for bucket, taken in zip(buckets, flats, strict=True):
            write(bucket, unpack(torch.where(finite.to(taken.device), taken, pack(bucket)), like=bucket))
        return finite

    def _buffers_finite(self, buffers: Mapping[str, Tensor]) -> Tensor:
        each = {name: b for name, b in buffers.items() if b.is_floating_point()}
        return all_finite({name: b for name, b in each.items() if name not in self.nonfinite_by_design})

    # State of the codecs and of the outer step

    def reset(self, gradient: State | None = None) -> None:
        """Drop all state; go on with `gradient`, if it is given, and with the loss scale that it is in."""
        kept = {key: self.state[key] for key in ("loss_scale",) if gradient is not None and key in self.state}
        self.state = {"gradient": gradient or {}, "weights": {}, "outer": {}, **kept}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the codecs and of the outer step, without caches."""
        frozen = [name for name, p in self.originals.items() if not p.requires_grad]  # averaged once more
        return {"state": without(self.state)} | ({"frozen": frozen} if frozen else {})

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        frozen = set(saved.get("frozen", ()))
        if frozen and not self.sharded:
            named = _by_name(self.model.named_parameters())
            self._look_up({id(p) for name, p in named.items() if name in self.originals or name in frozen})
            self.unsynced -= frozen
        self.state = copied(saved["state"], self.devices)


def _run(
    queue: CollectiveQueue,
    tensors: Mapping[str, Tensor],
    request: Callable[[Tensor], Request],
    phase: str,
    commit: Commit,
) -> None:
    """Request something of each bucket of tensors, and write it over them: when it arrives, or after all have."""
    found: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    def exchange(bucket: dict[str, Tensor]) -> Exchange[None]:
        flat = pack(bucket)
        if flat.numel():  # no collective for an empty tensor
            flat = yield request(flat)
        values = unpack(flat, like=bucket)
        if commit == "atomic":
            found.append((bucket, values))
        else:
            write(bucket, values)

    queue.run_all([exchange(bucket) for bucket in bucketed(tensors)], phase)
    for bucket, values in found:
        write(bucket, values)


def _mean(x: Tensor) -> Exchange[Tensor]:
    return (yield Mean(x))


def facts_of_model(model: nn.Module, optimizers: Iterable[Optimizer], workers: int) -> ModelFacts:
    """Return what a target of bytes is resolved from; of a sharded tensor, the shape of its first, largest shard."""
    trained = {name: _shape(p) for name, p in _by_name(model.named_parameters()).items() if p.requires_grad}
    buffers = {name: _shape(b) for name, b in _by_name(model.named_buffers()).items()}
    return facts_of(trained, workers, buffers, kinds_of(optimizers), workers_on_this_machine(workers))


def _shape(t: Tensor) -> Tensor:
    """Return a tensor without memory, of the shape and dtype that are averaged on the worker of the first shard."""
    sharding, shape = sys.modules.get("torch.distributed.tensor"), list(t.shape)
    if sharding is not None and isinstance(t, sharding.DTensor):
        for count, placement in zip(t.device_mesh.shape, t.placements, strict=True):
            if placement.is_shard():
                shape[placement.dim] = -(-shape[placement.dim] // count)
    empty = torch.empty(shape, dtype=t.dtype, device="meta")
    return torch.view_as_real(empty) if t.is_complex() else empty


def kinds_of(optimizers: Iterable[Optimizer]) -> tuple[Kind, ...]:
    """Return the kinds of optimizers, as they were measured."""
    kinds: set[Kind] = set()
    for name in (type(each).__name__.lower() for each in optimizers):
        kinds.add("muon" if "muon" in name else "sgd" if "sgd" in name else "adaptive")
    return tuple(sorted(kinds))


def flat(moments: Moments) -> dict[str, Tensor]:
    """Join the moments of all parameters."""
    return {key: t for each in moments.values() for key, t in each.items()}


def local_of(t: Tensor) -> Tensor:
    """Return what is averaged of a tensor: the shard of a DTensor, a real view of a complex one, or the tensor."""
    sharding = sys.modules.get("torch.distributed.tensor")  # slow to import; loaded wherever a DTensor exists
    local = (t.to_local() if sharding is not None and isinstance(t, sharding.DTensor) else t).detach()
    return torch.view_as_real(local) if local.is_complex() else local


def parts_of(name: str, t: Tensor) -> dict[str, Tensor]:
    """Return the dense tensors of which a tensor subclass is made, as its class names them; else the tensor itself."""
    if not hasattr(t, "__tensor_flatten__"):
        return {name: t}
    found = [parts_of(f"{name}.{part}", getattr(t, part)) for part in t.__tensor_flatten__()[0]]
    return {name: dense for parts in found for name, dense in parts.items()}


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


def without(tree: Any, names: Collection[str] = ()) -> Any:
    """Copy a tree of dicts without the keys `names`, at any depth, and without caches, whose keys begin with "_"."""
    if isinstance(tree, Mapping):
        kept = {key: value for key, value in tree.items() if key not in names and not key.startswith("_")}
        return {key: without(value, names) for key, value in kept.items()}
    return tree
