"""DDP models: gradients are averaged in DDP's communication hook, while backward goes on.

A DDP model takes one hook in its life. Ours passes buckets to the session that is attached, or averages as DDP does.
In this file: the hook, `DDPPath`, and DDP's buckets in the order in which they become ready.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from laconic.checks.agreement import Facts
from laconic.checks.headers import Headers, start_headers
from laconic.codecs.feedback import has_residuals, return_to_residual
from laconic.comm.queue import CollectiveQueue, new_future, resolved
from laconic.exchange import Averaged, Exchange, Level, all_finite
from laconic.plans.plan import Plan
from laconic.plans.schedules import Sync
from laconic.session.gradients import MANUAL, GradientAverager, GradientPath, sparse_tables
from laconic.session.live_model import local_of
from laconic.session.scaling import ScaledSteps
from laconic.session.step_headers import StepHeaders
from laconic.torch_private.distributed import is_joining
from laconic.torch_private.modules import at_end_of_backward, clean

if TYPE_CHECKING:
    from laconic.torch_private.distributed import GradBucket

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


class DDPPath(GradientPath):
    """Averages the buckets of a DDP model."""

    def __init__(self, ddp: DistributedDataParallel, averager: GradientAverager, headers: StepHeaders) -> None:
        self._averager = averager
        self._ddp = weakref.ref(ddp)  # as in `_Hook`
        self._step_headers = headers
        self._hook: _Hook | None = None
        self._keeps_views = not getattr(ddp, "lazy_bucket_allocation", False)
        """Whether DDP keeps its buckets after a backward: not if it frees them, which is new in torch 2.15."""
        self._views: dict[int, tuple[int, Sequence[Tensor], dict[str, Tensor]]] = {}
        """Of each bucket of the last backward: the address of its memory, its parameters, and its gradients by name."""
        self._averaged: set[str] = set()
        """The names of all gradients in the buckets so far."""
        self._queues: dict[Level, BucketQueue] = {}
        self._headers: Headers | Callable[[], Headers] | None = None
        """The headers of this backward, or what waits for them."""
        self._ignored_buffers = {f"buffer:{clean(name)}" for name in ddp.parameters_to_ignore}
        self._finds_unused = ddp.find_unused_parameters and not ddp.static_graph and averager.levels.workers > 1
        self._sent: dict[str, Tensor] = {}
        """The buckets of this backward by name, where DDP may drop some of their means."""
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
        check_finalization(ddp)
        self._hook = _hook_of(ddp)
        self._hook.start(self._take)

    def begin_step(self, sync: Sync | None) -> None:
        """Prepare for the next step. Where no gradients are averaged, DDP sends nothing at all."""
        self._sync = sync
        assert self._hook is not None, "install() comes first"
        self._hook.allow(sync is not None)

    def _take(self, bucket: GradBucket) -> Future[Tensor]:
        if self._sync is None:
            return resolved(bucket.buffer())
        if bucket.buffer().is_sparse:
            raise RuntimeError(SPARSE.format("a parameter"))
        # Headers go first, in the same queue, and are read before the optimizer's step; at once where they tell by
        # how much gradients are multiplied.
        if self._averager.counts is not None:
            if bucket.index() == 0:
                self._headers = self._averager.weigh_in_backward(self._sync.level, self._step_headers)
        elif self._headers is None and self._step_headers.stop_due:
            self._headers = start_headers(self._averager.levels.world, self._step_headers.stop_header())
        queue = self._queues.get(self._sync.level) or self._queue(self._sync.level)
        tensors = self._gradients(bucket)
        if self._finds_unused:
            # DDP drops means of parameters that no worker used: they go back to the residuals. It sends a bitmap itself
            # in such a backward: for each parameter, whether it was used, as an int32.
            self._sent |= tensors
            if bucket.is_last() and self._sent:
                world = self._averager.levels.world
                world.ledger.record("all_reduce", 4 * len(self._sent), world.workers, phase="control")
                # Twice, to come after DDP's own callback, which is queued after this bucket.
                at_end_of_backward(lambda: at_end_of_backward(self._return_dropped))
        return queue.take(tensors, bucket.buffer(), bucket.is_last(), self._averager.average)

    def _gradients(self, bucket: GradBucket) -> dict[str, Tensor]:
        """Return a bucket's gradients by name: the same dict in every backward, as long as DDP keeps its memory.

        Making hundreds of views costs more time than averaging them. A view keeps its memory alive, so a known address
        means known memory; where DDP frees its buckets after backward, views are made each time.
        """
        params, address = bucket.parameters(), bucket.buffer().data_ptr()
        known = self._views.get(bucket.index())
        if known is not None:
            if known[0] == address and len(known[1]) == len(params) and all(map(is_, known[1], params)):
                return known[2]
            self._views.clear()  # DDP has rebuilt its buckets: release the old memory
        names = self._averager.live.name_of
        tensors = {names[id(p)]: g for p, g in zip(params, gradients_of(bucket), strict=True)}
        self._averaged.update(tensors)
        if self._keeps_views:
            self._views[bucket.index()] = (address, params, tensors)
        return tensors

    def _return_dropped(self) -> None:
        """Return means that DDP has dropped, of parameters that no worker used, to where error feedback took them from.

        DDP has copied the others to their parameters just now, before anything could clip or unscale them.
        """
        sent, self._sent = self._sent, {}
        state, params = self._averager.live.state["gradient"], self._averager.live.originals
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
        if level not in self._queues:
            group = self._averager.levels[level]
            self._queues[level] = BucketQueue(group, quiet=True, keeps=self._keeps_views)
        return self._queues[level]

    def before_optimizer(self, optimizer: ScaledSteps) -> Headers | None:
        """Return the headers that were exchanged beside the gradients. DDP's backward has waited for these."""
        ddp = self._ddp()
        if ddp is not None:
            check_finalization(ddp)
            if is_joining(ddp):
                raise RuntimeError(
                    f"{self._step_headers.plan!r} inside DDP's join(): a worker that has run out of data cannot take "
                    "part in what all workers exchange. Give all workers as many batches, such as by "
                    "DistributedSampler(drop_last=True), and leave join() out."
                )
        headers, self._headers = self._headers, None
        self._was_local = self._was_local or self._sync is None
        if self._sync is not None:
            self._check_parameters()
        return headers() if callable(headers) else headers

    def _check_parameters(self) -> None:
        """Refuse parameters that are trained, and that DDP does not average."""
        ddp, live = self._ddp(), self._averager.live
        live.refresh()
        if ddp is None or live.facts is self._checked:
            return
        self._checked, averaged = live.facts, self._averaged | ddp.parameters_to_ignore
        for name, p in live.originals.items():
            if p.grad is not None and name not in averaged:
                self._checked = None
                raise RuntimeError(
                    f"{name} is trained, and DistributedDataParallel does not average it: it was frozen, or was not "
                    "there, when the DDP model was made. Make the DDP model again, and attach to it."
                )

    def after_optimizer(self) -> None:
        """Give all workers the first worker's buffers, if DDP would do so before the next forward."""
        assert self._hook is not None
        if self._hook.broadcasts_buffers:
            step = self._step_headers.step
            self._averager.live.take_first_buffers(self._averager.levels.world, step, self._ignored_buffers)

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


def check_ddp_model(ddp: DistributedDataParallel) -> None:
    """Refuse embeddings with sparse gradients, and DDP's own mixed precision, which averages in a hook of its own."""
    if ddp.mixed_precision is not None:
        raise ValueError(
            "attach: DistributedDataParallel(mixed_precision=...) averages gradients in a communication hook of its "
            "own, and DDP takes only one. Make the model without mixed_precision, and compute the loss under "
            "torch.autocast."
        )
    for name, table in sparse_tables(ddp.module).items():
        raise ValueError(SPARSE.format(f"{type(table).__name__} {name!r}"))


Average = Callable[[dict[str, Tensor]], Exchange[Averaged]]
"""Averages a bucket, and writes the means over it."""

TOGETHER_BYTES = 512 << 20
"""On CUDA, buckets are averaged together up to this size: launches cost more there than bytes."""


@dataclass(frozen=True, eq=False)
class _Bucket:
    tensors: dict[str, Tensor]
    flat: Tensor
    future: Future[Tensor]


@dataclass(eq=False)
class BucketQueue:
    """Submits exchanges for buckets, in order: one each, or one for several on CUDA.

    DDP rebuilds its buckets after the first backward, by the order in which gradients became ready. A resumed run
    starts with the old layout once more. Where the layout decides the last bit (which sums share a message; what a
    batched codec takes for one matrix), the first backward after loading waits until all buckets are ready, and
    averages them in the layout that was saved.
    """

    queue: CollectiveQueue
    layout: list[list[str]] = field(default_factory=list)
    """Names by exchange, as of the last backward."""
    quiet: bool = False
    """Whether the caller looks for errors before the optimizer's step: DDP's backward cannot raise them as they are."""
    keeps: bool = True
    """Whether the views of one backward may be kept for the next."""
    _next_layout: list[list[str]] = field(default_factory=list)
    _repeat: list[list[str]] | None = None
    _waiting: list[_Bucket] = field(default_factory=list)
    _joined: list[tuple[list[dict[str, Tensor]], dict[str, Tensor]]] = field(default_factory=list)
    """Of each exchange of the last backward, its buckets and all their tensors."""

    def repeat(self, layout: Sequence[Sequence[str]]) -> None:
        """Average the next backward in this layout, whatever DDP's is."""
        self._repeat = [list(names) for names in layout] or None

    def take(self, tensors: dict[str, Tensor], flat: Tensor, last: bool, average: Average) -> Future[Tensor]:
        """Average one bucket; the future's value is `flat` with the means in it."""
        future: Future[Tensor] = new_future(flat) if flat.is_cuda else Future()
        self._waiting.append(_Bucket(tensors, flat, future))
        # 1. One exchange a bucket on the CPU; on CUDA several together, as launches cost more than bytes.
        enough = not flat.is_cuda or sum(b.flat.nbytes for b in self._waiting) >= TOGETHER_BYTES
        if last or (self._repeat is None and enough):
            ready, self._waiting = self._waiting, []
            if self._repeat is not None:
                buckets = self._as_saved(ready, self._repeat)
            elif len(ready) == 1:
                buckets = [tensors]
            else:
                buckets = [self._join([bucket.tensors for bucket in ready])]
            self._next_layout += [list(bucket) for bucket in buckets]
            exchanges = [average(bucket) for bucket in buckets]
            self.queue.submit_all(exchanges, "gradient", [b.flat for b in ready], [b.future for b in ready], self.quiet)
        # 2. The end of the backward.
        if last:
            self.layout, self._next_layout, self._repeat = self._next_layout, [], None
            del self._joined[len(self.layout) if self.keeps else 0 :]
            self.queue.flush()
        return future

    def _join(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Join buckets that are averaged together: the same dict as in the last backward if its parts are the same."""
        index = len(self._next_layout)
        if index < len(self._joined):
            known, whole = self._joined[index]
            if len(known) == len(parts) and all(map(is_, known, parts)):
                return whole
        whole = {name: t for part in parts for name, t in part.items()}
        self._joined[index:] = [(parts, whole)]
        return whole

    @staticmethod
    def _as_saved(ready: Sequence[_Bucket], layout: list[list[str]]) -> list[dict[str, Tensor]]:
        tensors = {name: t for bucket in ready for name, t in bucket.tensors.items()}
        if sorted(tensors) != sorted(name for names in layout for name in names):
            return [bucket.tensors for bucket in ready]  # not the model that was saved: use its own layout
        return [{name: tensors[name] for name in names} for names in layout]


def check_finalization(ddp: DistributedDataParallel) -> None:
    """Refuse a backward that the user ends: new in torch 2.15."""
    if getattr(ddp, "require_manual_backward_finalization", False):
        raise RuntimeError(MANUAL.format("require_manual_backward_finalization is set", "Set it to False."))


def gradients_of(bucket: GradBucket) -> list[Tensor]:
    """View the gradients in a bucket, each in its parameter's memory layout; complex ones as real numbers.

    The buffer of complex parameters is real, and `bucket.gradients()` takes it for complex: their views are wrong.
    """
    params = [local_of(p) for p in bucket.parameters()]
    parts = bucket.buffer().split([p.numel() for p in params])
    return [as_laid_out(part.view(p.shape), p) for part, p in zip(parts, params, strict=True)]


def as_laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """View a gradient of a DDP bucket with its parameter's strides.

    DDP writes gradients in their parameters' memory layout, but shows a hook each as if it were row-major: of a
    transposed or channels_last parameter that is another matrix.
    """
    if parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return gradient  # DDP keeps permutations of row-major strides, and only those
    return gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())
