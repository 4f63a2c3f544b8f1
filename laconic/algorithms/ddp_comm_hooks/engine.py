"""Shared parts of the hooks: states, their collectives and names of parameters; averaging with one collective."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from laconic.codecs import Codec
from laconic.comm.averaging import written
from laconic.comm.collectives import launch
from laconic.comm.queue import CollectiveQueue, resolved
from laconic.exchange import Averaged, Decide, Done, Exchange, Peers, State, advance
from laconic.ledger import Ledger
from laconic.session.ddp import Average, BucketQueue

if TYPE_CHECKING:
    from laconic.torch_private.distributed import GradBucket


def group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or the default process group for None, as torch's hooks do."""
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise RuntimeError(
            "no process group was given and there is no default one. "
            "Call torch.distributed.init_process_group(...) before the first backward pass."
        )
    return found


class ParameterNames:
    """Stable names for the parameters in a hook's buckets.

    DDP does not pass names to a hook, but its first buckets hold the parameters in reverse order. So the first backward
    names each by its index counted from the last, `parameter[-1]`, and this name stays when DDP rebuilds its buckets.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # by id(), which a later parameter may reuse

    def gradients(self, bucket: GradBucket) -> dict[str, Tensor]:
        """Return the gradients of a bucket by the names of their parameters."""
        parameters = bucket.parameters()
        if not all(id(p) in self._known and self._known[id(p)][0]() is p for p in parameters):
            if bucket.index() == 0:  # the first model, or another one
                self._known = {}
            last = len(self._known) + len(parameters)
            for index, p in enumerate(parameters):
                self._known[id(p)] = (weakref.ref(p), f"parameter[-{last - index}]")
        return {self._known[id(p)][1]: g for p, g in zip(parameters, bucket.gradients(), strict=True)}


class Engine:
    """The queue, ledger and buckets of one hook state in one group. Never saved."""

    def __init__(self, group: dist.ProcessGroup | None, layout: Sequence[Sequence[str]] = ()) -> None:
        self.group = group_or_world(group)
        self.ledger = Ledger()
        self.queue = CollectiveQueue(self.group, self.ledger)
        self.buckets = BucketQueue(self.queue)
        self.buckets.repeat(layout)
        self.first_backward = True
        self.state_tree: State = {}  # of PowerSGD's codec
        self.state_tree_key: tuple[object, ...] = ()

    def average(self, tensors: dict[str, Tensor], bucket: GradBucket, begin: Average) -> Future[Tensor]:
        """Submit the exchange that `begin` starts, which then writes the means over the gradients of the bucket."""
        return self.buckets.take(tensors, bucket.buffer(), bucket.is_last(), lambda some: written(begin(some), some))


class HookState:
    """Base of the hook states: attributes that torch's do not have, so that `__slots__` is the same as torch's."""

    __slots__ = ("__weakref__", "_engines", "_names", "_saved_layout", "feedback")

    def _get_engine(self, group: dist.ProcessGroup | None, local: bool = False) -> Engine:
        group, engine = group_or_world(group), self._engines.get(local)
        if engine is None or engine.group is not group:
            engine = self._engines[local] = Engine(group, self._saved_layout)
        return engine

    def _reset(self, engines: dict[bool, Engine], layout: Sequence[Sequence[str]] = ()) -> None:
        """Name parameters anew, and average the next backward in this bucket layout. An empty one means DDP's own."""
        self._engines, self._names = engines, ParameterNames()
        self._saved_layout = [list(names) for names in layout]
        for engine in engines.values():
            engine.buckets.layout = []
            engine.buckets.repeat(self._saved_layout)

    def _layout(self) -> list[list[str]]:
        used = [engine.buckets.layout for _, engine in sorted(self._engines.items()) if engine.buckets.layout]
        return used[-1] if used else self._saved_layout


def average_once(codec: Codec, group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket through a codec with one collective, launched here, on `group`. The callback does not wait."""
    tensors, group = {"": bucket.buffer()}, group_or_world(group)
    exchange = codec.average(tensors, {}, Peers(group.rank(), group.size()), reuse=True)
    handles = _handles(written(exchange, tensors), group)
    work = next(handles, None)
    if work is None:  # a single worker
        return resolved(tensors[""])

    def finish(done: Future[Any]) -> Tensor:
        done.value()  # raises the error of the collective
        if next(handles, None) is not None:
            raise RuntimeError(f"{codec} needs more than one collective. Run it in a CollectiveQueue.")
        return tensors[""]

    future: Future[Any] = work.get_future()
    return future.then(finish)


def _handles(exchange: Exchange[Averaged], group: dist.ProcessGroup) -> Iterator[Any]:
    """Launch the collectives of an exchange, and yield the handle of each."""
    asked = advance(exchange, None)
    while not isinstance(asked, Done):
        answer = asked.ok if isinstance(asked, Decide) else (yield from launch(asked, group))
        asked = advance(exchange, answer)
