"""DDP models: gradients are averaged in DDP's communication hook, while backward goes on.

A DDP model takes one hook in its life. Ours passes buckets to the session that is attached, or averages as DDP does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from laconic.checks.agreement import Facts
from laconic.checks.headers import Headers, PendingHeaders
from laconic.codecs import Codec
from laconic.codecs.feedback import has_residuals, return_to_residual
from laconic.comm.queue import resolved
from laconic.exchange import Level, all_finite
from laconic.plans.plan import Plan
from laconic.plans.schedules import Sync
from laconic.session.bucket_queue import BucketQueue, BucketViews
from laconic.session.buffers import BufferSync
from laconic.session.grad_scaler import ScaledSteps
from laconic.session.gradients import GradientAverager, sparse_tables
from laconic.session.model_state import local_of
from laconic.session.stop import StepHeaders
from laconic.session.unwrap import model_inside
from laconic.torch_private.autograd import at_end_of_backward, backward_id
from laconic.torch_private.distributed import is_joining

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

TakesBucket: TypeAlias = "Callable[[GradBucket], Future[Tensor]]"

SPARSE = (
    "attach: {} has sparse gradients, which DistributedDataParallel passes on as they are, and no codec takes. Make it "
    "with sparse=False, or attach to the bare module, which averages sparse gradients as dense ones."
)


class _Hook:
    """The one hook of a DDP model."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.take: TakesBucket | None = None
        self.group: dist.ProcessGroup = ddp.process_group
        # A weak reference: DDP holds its hook, and a cycle through C++ would never be collected.
        self._ddp = weakref.ref(ddp)
        self.broadcasts_buffers: bool = ddp.broadcast_buffers
        """Whether the user wants the first worker's buffers on all."""
        self._now = True

    def allow(self, buckets: bool) -> None:
        """Set whether DDP may send its buckets, with their bitmap, in the next step."""
        ddp = self._ddp()
        if ddp is None or buckets == self._now:
            return
        self._now = buckets
        if not ddp.static_graph:  # which must see every backward: its buckets reach `take`, and stay local there
            ddp.require_backward_grad_sync = buckets

    def start(self, take: TakesBucket) -> None:
        """Pass buckets to a session, which broadcasts the buffers, too."""
        ddp = self._ddp()
        if ddp is not None and self.take is None:
            self.broadcasts_buffers, ddp.broadcast_buffers = ddp.broadcast_buffers, False
        self.take = take

    def stop(self) -> None:
        """Let DDP average gradients and broadcast buffers itself again."""
        self.take = None
        self.allow(True)
        ddp = self._ddp()
        if ddp is not None:
            ddp.broadcast_buffers = self.broadcasts_buffers


# Without annotations: DDP compares them with its own classes, and here they would be strings.
def _average_bucket(hook, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Average one bucket: in the session that is attached, or as DDP does."""
    if hook.take is not None:
        return hook.take(bucket)
    flat = bucket.buffer().div_(hook.group.size())
    work = dist.all_reduce(flat, group=hook.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


_hooks: weakref.WeakKeyDictionary[DistributedDataParallel, _Hook] = weakref.WeakKeyDictionary()


def _hook_of(ddp: DistributedDataParallel) -> _Hook:
    known = _hooks.get(ddp)
    if known is None:
        known = _Hook(ddp)
        try:
            ddp.register_comm_hook(known, _average_bucket)
        except RuntimeError as error:
            raise RuntimeError(
                "attach: this DDP model already has a communication hook, and DDP takes only one. "
                "Make the model again without register_comm_hook; the plan defines how gradients are sent."
            ) from error
        _hooks[ddp] = known
    return known


class DDPPath:
    """Averages the buckets of a DDP model."""

    in_backward = True

    def __init__(self, ddp: DistributedDataParallel, averager: GradientAverager, headers: StepHeaders) -> None:
        self._averager = averager
        self._ddp = weakref.ref(ddp)  # as in `_Hook`
        self._step_headers = headers
        self._hook: _Hook | None = None
        self._views = BucketViews(averager.model_state)
        self._queues: dict[Level, BucketQueue] = {}
        self._sync: Sync | None = None
        self._headers: PendingHeaders | None = None
        self._buffer_sync = BufferSync(averager.model_state, ddp.parameters_to_ignore)
        self._finds_unused = ddp.find_unused_parameters and not ddp.static_graph and averager.levels.workers > 1
        self._bitmap_bytes = 0
        self._sent: dict[str, Tensor] = {}
        """The buckets of this backward by name, where DDP may drop some of their means."""
        self._joined = self._shadowed = False
        """Whether the last backward was inside DDP's `join()`; whether this worker had run out of data then."""
        self._was_local = False
        self._checked: Facts | None = None

    def check_plan(self, plan: Plan) -> None:
        """Refuse what DDP itself cannot do: find unused parameters again after steps without averaged gradients."""
        local = plan.local and plan.topology.inner is None and self._step_headers.step >= plan.schedule.start
        if self._finds_unused and self._was_local and not local:
            raise ValueError(
                f"change({plan!r}): with find_unused_parameters=True, DistributedDataParallel cannot average gradients "
                "after local steps: it hangs if a parameter is unused. Make the DDP model again, and attach to it."
            )

    def install(self) -> None:
        """Take DDP's buckets from now on. Refuses a model that has another hook."""
        ddp = self._ddp()
        assert ddp is not None
        self._hook = _hook_of(ddp)
        self._hook.start(self._take)

    def begin_step(self, sync: Sync | None, codec: Codec | None) -> None:
        """Prepare for the next step. Where no gradients are averaged, DDP sends nothing at all."""
        self._averager.begin_step(sync, codec)
        self._sync = sync
        assert self._hook is not None, "install() comes first"
        self._hook.allow(sync is not None)

    def _take(self, bucket: GradBucket) -> Future[Tensor]:
        if self._sync is None:
            return resolved(bucket.buffer())
        if bucket.index() == 0 and (self.joining or self._joined):
            self._begin_joined_backward(self._sync)
        if bucket.buffer().is_sparse:
            raise RuntimeError(SPARSE.format("a parameter"))
        if self._headers is None and self._step_headers.stop_due and not self._joined:
            self._headers = PendingHeaders(self._averager.levels.world, self._step_headers.stop_header())
        queue = self._queues.get(self._sync.level) or self._queue(self._sync.level)
        tensors = self._views.tensors(bucket)
        if self._finds_unused:
            self._record_bitmap(len(tensors), bucket.is_last())
            if not self._shadowed:
                self._sent |= tensors
            if bucket.is_last() and self._sent:
                # Twice, to come after DDP's own callback, which is queued after this bucket.
                at_end_of_backward(lambda: at_end_of_backward(self._return_dropped))
        return queue.take(tensors, bucket.buffer(), bucket.is_last(), self._averager.average)

    @property
    def joining(self) -> bool:
        """Whether training is inside DDP's `join()`."""
        ddp = self._ddp()
        return ddp is not None and is_joining(ddp)

    def _begin_joined_backward(self, sync: Sync) -> None:
        """Prepare a backward inside DDP's `join()`, or the first after it.

        A worker that has run out of data calls the hook with zeros, outside of any backward, once for each step of the
        others: it counts these steps. DDP itself broadcasts buffers meanwhile, from a worker that has data.
        """
        headers, ddp = self._step_headers, self._ddp()
        assert ddp is not None and self._hook is not None
        if self._shadowed:
            self._averager.check.forget()
            headers.begin_step(headers.plan, headers.step + 1, among_all=sync.level is None)
            self._averager.begin_step(sync, headers.plan.codec_of(sync, headers.step))
            self._averager.levels.world.ledger.step = headers.step
        self._joined = self._averager.check.alone = self.joining
        self._shadowed = self._joined and backward_id() < 0
        ddp.broadcast_buffers = self._joined and self._hook.broadcasts_buffers

    def _record_bitmap(self, parameters: int, last: bool) -> None:
        """Record what DDP sends itself in such a backward: for each parameter, whether it was used, as an int32."""
        self._bitmap_bytes += 4 * parameters
        if last:
            world = self._averager.levels.world
            world.ledger.record("all_reduce", self._bitmap_bytes, world.workers, phase="control")
            self._bitmap_bytes = 0

    def _return_dropped(self) -> None:
        """Return means that DDP has dropped, of parameters that no worker used, to where error feedback took them from.

        DDP has copied the others to their parameters just now, before anything could clip or unscale them.
        """
        sent, self._sent = self._sent, {}
        state, params = self._averager.model_state.state["gradient"], self._averager.model_state.originals
        if self._averager.levels.world.broken is not None or not has_residuals(state):
            return
        finite = all_finite(sent)
        for name, mean in sent.items():
            grad = params[name].grad
            if grad is None:
                return_to_residual(state, {name: mean}, finite)
            elif grad.data_ptr() != mean.data_ptr():
                real = local_of(grad)
                return_to_residual(state, {name: mean}, finite & (real != mean.to(real.dtype)).any())

    def _queue(self, level: Level) -> BucketQueue:
        return self._queues.setdefault(level, BucketQueue(self._averager.levels[level], quiet=True))

    def average_now(self, optimizers: Sequence[ScaledSteps]) -> Headers | None:
        """Do nothing: gradients are averaged in backward."""
        return None

    def before_optimizer(self, optimizer: ScaledSteps) -> Headers | None:
        """Return the headers that were exchanged beside the gradients. DDP's backward has waited for these."""
        if self.joining and self._step_headers.plan.local:
            raise RuntimeError(
                f"{self._step_headers.plan!r} inside DDP's join(): a worker that has run out of data takes no part in "
                "averaging weights, and the others would wait for it. Give all workers as many batches, or use a plan "
                "that averages gradients in every step, such as ddp() or power_sgd(rank=4)."
            )
        headers, self._headers = self._headers, None
        self._was_local = self._was_local or self._sync is None
        if self._sync is not None:
            self._check_parameters()
        return None if headers is None else headers.wait()

    def _check_parameters(self) -> None:
        """Refuse parameters that are trained, and that DDP does not average."""
        ddp, model_state = self._ddp(), self._averager.model_state
        model_state.refresh()
        if ddp is None or model_state.facts is self._checked:
            return
        self._checked, averaged = model_state.facts, self._views.names | ddp.parameters_to_ignore
        for name, p in model_state.originals.items():
            if p.grad is not None and name not in averaged:
                self._checked = None
                raise RuntimeError(
                    f"{name} is trained, and DistributedDataParallel does not average it: it was frozen, or was not "
                    "there, when the DDP model was made. Make the DDP model again, and attach to it."
                )

    def after_optimizer(self) -> None:
        """Give all workers the first worker's buffers, if DDP would do so before the next forward."""
        assert self._hook is not None
        if self._hook.broadcasts_buffers and not self.joining:
            self._buffer_sync.sync(self._averager.levels.world, self._step_headers.step)

    def layout(self) -> dict[str, list[list[str]]]:
        """Return the names of the parameters of each exchange of the last backward, by level."""
        return {str(level): queue.layout for level, queue in self._queues.items()}

    def repeat_layout(self, layout: Mapping[str, Any]) -> None:
        """Average the next backward in this layout."""
        for level in (None, *self._averager.levels.named()):
            if str(level) in layout:
                self._queue(level).repeat(layout[str(level)])

    def detach(self) -> None:
        """Let DDP average gradients itself again, unless another session has taken its hook."""
        if self._hook is not None and self._hook.take == self._take:
            self._hook.stop()


def check_dense(ddp: DistributedDataParallel) -> None:
    """Refuse embeddings with sparse gradients."""
    for name, table in sparse_tables(ddp.module).items():
        raise ValueError(SPARSE.format(f"{type(table).__name__} {name!r}"))


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP model, also inside a wrapper of torch.compile or Fabric; None for another model."""
    inside = model_inside(model)
    return inside if isinstance(inside, DistributedDataParallel) else None
