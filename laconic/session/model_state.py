"""One worker's copy of the model, and how it is brought together with the others'."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from laconic.checks.finite import GradientGuard, NonFinite
from laconic.codecs import Codec, Exact
from laconic.codecs.packing import as_laid_out, in_buckets
from laconic.comm.averaging import written
from laconic.comm.groups import Levels
from laconic.comm.queue import CollectiveQueue
from laconic.comm.requests import Averaged, Exchange, Mean, State
from laconic.cost import routed
from laconic.plans.schedules import Level, Payload
from laconic.session.bucket_queue import BucketQueue, BucketViews

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

Opened: TypeAlias = Callable[[CollectiveQueue, Sequence[int]], Tensor]

_BITS = 62
_ALL = (1 << _BITS) - 1


class ModelState:
    """Parameters by name, what the codecs remember of them, and the levels whose queues carry their averages.

    `params` are the tensors that are averaged: of a sharded parameter, this worker's shard. `originals` are the
    parameters as the model and the optimizers know them.
    """

    def __init__(self, model: nn.Module, levels: Levels, nonfinite: NonFinite = "ignore", late: bool = False) -> None:
        self.levels = levels
        self.guard = GradientGuard(nonfinite, late)
        self.originals = {clean(name): p for name, p in model.named_parameters() if p.requires_grad}
        self.params = {name: local_of(p) for name, p in self.originals.items()}
        self.all_buffers = {f"buffer:{clean(name)}": local_of(b) for name, b in model.named_buffers()}
        self.buffers = {name: b for name, b in self.all_buffers.items() if b.is_floating_point()}
        self.name_of = {id(p): name for name, p in self.originals.items()}
        self.devices = {name: p.device for name, p in self.params.items()}
        self.state: dict[str, State] = fresh_state()
        self.solo_exact = True
        """Whether a world of one sends exactly; benchmarks of the codecs themselves say no."""
        self._streams: dict[Level, BucketQueue] = {}
        self._ddp_buckets = BucketViews()
        self._buckets = in_buckets(self.params)

    @property
    def queue(self) -> CollectiveQueue:
        """The queue of all workers."""
        return self.levels.world

    @property
    def no_words(self) -> list[int]:
        """What a header says where it has nothing to say: of which gradients there are, and of its sender's clock.

        Headers of all rounds are equally long.
        """
        return [0] * (-(-len(self.originals) // _BITS) + 1)

    def regroup(self, levels: Levels) -> None:
        """Session to other workers from now on."""
        self.levels = levels
        self.guard.forget()  # what it noted of a step that failed half-way
        self._streams = {}

    def average_bucket(self, codec: Codec, level: Level, bucket: GradBucket) -> Future[Tensor]:
        """Start to average one DDP bucket; the future's value is its buffer, with the means in it."""
        tensors = self._ddp_buckets.tensors(bucket, self._named)

        def begin(together: Mapping[str, Tensor]) -> Exchange:
            return self.average_of(codec, self.levels[level], together)

        return self._stream(level).take(tensors, bucket.buffer(), bucket.is_last(), begin)

    def _named(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> dict[str, Tensor]:
        return {self.name_of[id(p)]: as_laid_out(g, p) for p, g in zip(params, grads, strict=True)}

    def _stream(self, level: Level) -> BucketQueue:
        if level not in self._streams:
            self._streams[level] = BucketQueue(self.levels[level], quiet=True)
        return self._streams[level]

    def average_gradients(self, codec: Codec, level: Level, opened: Opened) -> None:
        """Average `.grad` of every parameter, and wait for it. A gradient that is None here counts as zero.

        `opened` tells all workers what this one says, and returns what they say.
        """
        queue = self.levels[level]
        absent = self._absent_everywhere(queue, opened)
        grads = {}
        for name, p in self.originals.items():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.grad.is_sparse:
                p.grad = p.grad.to_dense()
            grads[name] = local_of(p.grad)
        exchanges = []
        for names in self._buckets:
            bucket = {name: grads[name] for name in names}
            exchanges.append(written(self.average_of(codec, queue, bucket), bucket))
        queue.run_all(exchanges, Payload.GRADIENT)
        for name in absent:
            self.originals[name].grad = None

    def average_of(self, codec: Codec, queue: CollectiveQueue, bucket: Mapping[str, Tensor]) -> Exchange:
        """Average a bucket of gradients, whose memory may be overwritten, under the guard's eyes."""
        chosen = self.routed(codec, queue)
        return self.guard.watched(bucket, lambda: chosen.average(bucket, self.state["gradient"], reuse=True))

    def verdict(self, level: Level, step: int) -> Tensor | None:
        """Say the same in a tensor, as 1.0, without waiting for it; `guard.tell` names who it was, later."""
        return self.guard.verdict(self.levels[level], self._gradients, step)

    def spoiled(self, level: Level, step: int) -> bool:
        """Tell whether the gradients that were averaged last are of no use; names who spoiled them."""
        return self.guard.spoiled(self.levels[level], self._gradients, step)

    def _gradients(self) -> dict[str, Tensor | None]:
        return {name: None if p.grad is None else local_of(p.grad) for name, p in self.originals.items()}

    def broadcast(self) -> None:
        """Give every worker the weights and buffers of the first, as DDP does when it is made."""
        if self.queue.workers == 1:
            return
        group = self.queue.group
        first = dist.get_process_group_ranks(group)[0]
        with torch.no_grad():
            for t in (*self.params.values(), *self.all_buffers.values()):
                dense = t.contiguous()
                dist.broadcast(dense, src=first, group=group)
                t.copy_(dense)

    def routed(self, codec: Codec, queue: CollectiveQueue) -> Codec:
        """Choose the codec that runs: a worker alone has nobody to be brief with."""
        return Exact() if queue.workers == 1 and self.solo_exact else routed(codec)

    def _absent_everywhere(self, queue: CollectiveQueue, opened: Opened) -> list[str]:
        """Names whose gradient is None on every worker: they stay None, so that no optimizer moves them."""
        here = sum(1 << i for i, p in enumerate(self.originals.values()) if p.grad is not None)
        *words, number = self.no_words
        rows = opened(queue, [*(here >> (_BITS * i) & _ALL for i in range(len(words))), number])
        used = sum(reduce(or_, column) << (_BITS * i) for i, column in enumerate(rows.t().tolist()[:-1]))
        return [name for i, name in enumerate(self.params) if not used >> i & 1]

    def state_dict(self) -> dict[str, Any]:
        """What this worker must remember besides weights: codec states, the outer state, the buckets' layouts."""
        layout = {str(level): stream.layout for level, stream in self._streams.items()}
        return {"state": _saved(self.state), "layout": layout}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.state = copied(saved["state"], self.devices)
        layouts = saved["layout"] if isinstance(saved["layout"], Mapping) else {"None": saved["layout"]}
        for level in (None, *self.levels.named()):
            if str(level) in layouts:
                self._stream(level).repeat(layouts[str(level)])


def fresh_state() -> dict[str, State]:
    """What is remembered at the start: nothing, of three kinds."""
    return {"gradient": {}, "weights": {}, "outer": {}}


def local_of(t: Tensor) -> Tensor:
    """Take this worker's part of a tensor: the shard of a DTensor, and any other tensor itself."""
    sharding = sys.modules.get("torch.distributed.tensor")  # slow to import, and whoever has a DTensor has done so
    return (t.to_local() if sharding is not None and isinstance(t, sharding.DTensor) else t).detach()


def clean(name: str) -> str:
    """Drop what wrappers put into a parameter's name.

    >>> clean("module._orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    name = name.removeprefix("module.")
    return name.replace("_orig_mod.", "").removeprefix("module.")


def flags(here: Tensor) -> Exchange:
    """Hear what share of the workers says yes, to each of many questions."""
    mean = yield Mean(here)
    return Averaged({"flags": mean}, dict, lambda: torch.tensor(True))


def _saved(nest: Any) -> Any:
    """Leave out what begins with an underscore: caches that are made anew."""
    if isinstance(nest, Mapping):
        return {key: _saved(value) for key, value in nest.items() if not key.startswith("_")}
    return nest


def copied(nest: Any, devices: Mapping[str, torch.device] = MappingProxyType({})) -> Any:
    """Copy a nest of dicts and tensors, putting each tensor where the parameter of its name is."""
    if isinstance(nest, Mapping):
        return {
            key: value.to(devices.get(key, value.device), copy=True)
            if isinstance(value, Tensor)
            else copied(value, devices)
            for key, value in nest.items()
        }
    return nest
