"""DDP's side of a talk. DDP takes one hook in its life; this one forwards to whichever talk is attached."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

TakesBucket: TypeAlias = "Callable[[GradBucket], Future[Tensor]]"


class Dispatcher:
    """Forwards DDP's buckets to what is attached, or averages as DDP does."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.take: TakesBucket | None = None
        self.group: dist.ProcessGroup = ddp.process_group
        # Weakly: DDP holds its hook and so this dispatcher, and a cycle through C++ would never be collected.
        self._ddp = weakref.ref(ddp)
        self._broadcast_buffers = ddp.broadcast_buffers
        self._now = (True, True)

    def let_talk(self, buckets: bool, buffers: bool) -> None:
        """Say what DDP may send in the next step: its buckets and their bitmap; the buffers that it broadcasts.

        In a step of silence that is nothing at all.
        """
        ddp = self._ddp()
        if ddp is None or (buckets, buffers) == self._now:
            return
        self._now = (buckets, buffers)
        ddp.broadcast_buffers = buffers and self._broadcast_buffers
        if not ddp.static_graph:  # which must see every backward; its buckets come to us and stay
            ddp.require_backward_grad_sync = buckets

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Average one bucket."""
        if self.take is not None:
            return self.take(bucket)
        flat = bucket.buffer().div_(self.group.size())
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        assert work is not None
        future: Future[Any] = work.get_future()
        return future.then(lambda f: f.value()[0])


# Without annotations, as DDP compares them to its own classes and these are strings here.
def _forward_bucket(dispatcher, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return dispatcher(bucket)


_dispatchers: weakref.WeakKeyDictionary[DistributedDataParallel, Dispatcher] = weakref.WeakKeyDictionary()


def dispatcher_of(ddp: DistributedDataParallel) -> Dispatcher:
    """Find the dispatcher of a DDP model, or install one."""
    known = _dispatchers.get(ddp)
    if known is None:
        known = Dispatcher(ddp)
        try:
            ddp.register_comm_hook(known, _forward_bucket)
        except RuntimeError as error:
            raise RuntimeError(
                "attach: this DDP model already has a communication hook, and DDP takes only one. "
                "Make the model anew without register_comm_hook; the plan says how gradients travel."
            ) from error
        _dispatchers[ddp] = known
    return known


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Find the DDP model in what torch.compile has wrapped, if it is one."""
    while isinstance(getattr(model, "_orig_mod", None), nn.Module):
        model = model._orig_mod  # type: ignore[assignment]
    return model if isinstance(model, DistributedDataParallel) else None
