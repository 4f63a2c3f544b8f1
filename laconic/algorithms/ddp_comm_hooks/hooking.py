"""What the hooks of the twin share: the link to the engine, the names of parameters, and hooks of one round."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from laconic.codecs import Codec
from laconic.comm.averaging import write
from laconic.comm.queue import CollectiveQueue, resolved
from laconic.comm.requests import Averaged, State
from laconic.ledger import Ledger
from laconic.session.bucket_queue import BucketQueue

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


def group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or the default one for None, as torch's hooks take it."""
    if group is not None:
        return group
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError(
            "no process group was given and there is no default one. "
            "Call torch.distributed.init_process_group(...) before the first backward pass."
        )
    return world


class Names:
    """Lasting names for the parameters behind a hook's buckets.

    A hook is not told names. But DDP's first layout is the model's order, from the back: the last parameters come in
    the first bucket. So a parameter is named by its place counted from the last, `parameter[-1]`, at the first
    backward, and keeps that name when DDP lays its buckets out anew.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._owners: list[weakref.ref[Tensor]] = []
        self._seen = 0

    def of(self, bucket: GradBucket) -> dict[str, Tensor]:
        """Give each gradient of a bucket its parameter's name."""
        parameters = bucket.parameters()
        if any(id(p) not in self._names for p in parameters):
            if bucket.index() == 0:  # another model, or the first one
                self._names, self._owners, self._seen = {}, [], 0
            count = len(parameters)
            for place, p in enumerate(parameters):
                self._names[id(p)] = f"parameter[-{self._seen + count - place}]"
                self._owners.append(weakref.ref(p))  # ids stay taken as long as names are
            self._seen += count
        return {self._names[id(p)]: g for p, g in zip(parameters, bucket.gradients(), strict=True)}


class Engine:
    """A hook state's link to the engine: its queue, ledger and stream of buckets. Never saved."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group_or_world(group)
        self.ledger = Ledger()
        self.queue = CollectiveQueue(self.group, self.ledger)
        self.stream = BucketQueue(self.queue)
        self.names = Names()
        self.first_backward = True
        self.nest: tuple[State, State] | None = None
        """A PowerSGD state's memory as its codec takes it, and what that was made of."""
        self.nest_made_of: tuple[object, ...] = ()


def average_once(codec: Codec, group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket through a codec of one round, launched here and now on `group` itself.

    Nothing is launched or waited for in a callback, so the order is the caller's.
    """
    group = group_or_world(group)
    flat = bucket.buffer()
    tensors = {"": flat}
    exchange = codec.average(tensors, {}, reuse=True)
    request = next(exchange)
    answering = CollectiveQueue(group, Ledger(), share=True).answer(request)
    try:
        work = next(answering)
    except StopIteration as alone:
        return resolved(_finish(exchange, alone.value, tensors, flat))

    def end(done: Future[Any]) -> Tensor:
        done.value()
        try:
            next(answering)
        except StopIteration as stop:
            return _finish(exchange, stop.value, tensors, flat)
        raise RuntimeError(f"{codec} asks for more than one collective; a queue must drive it.")

    future: Future[Any] = work.get_future()
    return future.then(end)


def _finish(exchange: Any, answer: Tensor, into: Mapping[str, Tensor], flat: Tensor) -> Tensor:
    try:
        exchange.send(answer)
    except StopIteration as stop:
        result: Averaged = stop.value
        write(into, result.mean)
        return flat
    raise RuntimeError("a codec of one round asked again.")
