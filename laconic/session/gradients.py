"""How gradients reach the other workers: what the paths of three kinds of models share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from laconic.checks.finite import NonFiniteCheck
from laconic.checks.headers import Header, Headers, exchange_headers
from laconic.codecs import Codec, Exact, TopDCT
from laconic.codecs.feedback import contains, has_feedback, residuals_by_name, return_to_residual
from laconic.codecs.routing import routed
from laconic.comm.averaging import write
from laconic.comm.groups import Levels
from laconic.comm.queue import CollectiveQueue
from laconic.exchange import Averaged, Decide, Exchange, Level, State
from laconic.packing import narrowed, wide_dtype
from laconic.plans.plan import Plan
from laconic.plans.schedules import Sync
from laconic.session.live_model import LiveModel
from laconic.session.scaling import LossScale, ScaledSteps
from laconic.session.step_headers import Counts, StepHeaders
from laconic.torch_private.foreach import multiply_all, zero_all

CARRY_STEPS = 32
"""The steps over which residuals of an old codec are delivered, in equal portions."""
CARRIED = "carried"
"""The key of residuals that an old codec has not delivered, in the state of gradients. They follow the loss scale and
are saved as other residuals are."""

MANUAL = (
    "attach: {}, so gradients may not be there yet when backward ends, and laconic averages them in backward. {} "
    "Backward then ends as before."
)


class GradientPath:
    """Averages gradients for one kind of model: DDP (`ddp.py`), FSDP2 (`fsdp.py`), a bare module (`module.py`).

    A method here does nothing, for kinds of models that need nothing at this point.
    """

    in_backward = True
    """Whether gradients are averaged inside backward, and so also in a closure of `optimizer.step`."""
    _sync: Sync | None = None
    """How gradients are averaged in the next step, if they are."""

    def check_plan(self, plan: Plan) -> None:
        """Refuse a plan that this kind of model cannot follow."""

    def install(self) -> None:
        """Install the hooks. Nothing may be refused after it."""

    def begin_step(self, sync: Sync | None) -> None:
        """Prepare for the next step, in which gradients are averaged as `sync` says, or not at all for None."""
        self._sync = sync

    def average_now(self, optimizers: Sequence[ScaledSteps]) -> Headers | None:
        """Average the gradients of these optimizers early, where they are averaged at the optimizer's step."""
        return None

    def before_optimizer(self, optimizer: ScaledSteps) -> Headers | None:
        """Return once the gradients of this optimizer are averaged, with the headers that were exchanged for it."""
        return None

    def after_optimizer(self) -> None:
        """Complete a step whose gradients were averaged: DDP models then get the first worker's buffers."""

    def layout(self) -> dict[str, list[list[str]]]:
        """Return the names of the parameters that are averaged together, by level: a resumed run repeats them."""
        return {}

    def repeat_layout(self, layout: Mapping[str, Any]) -> None:
        """Average the next gradients in this layout."""

    def detach(self) -> None:
        """Remove the hooks."""


class GradientAverager:
    """Averages buckets of gradients through the codec of the step, and checks that they are finite."""

    def __init__(
        self,
        live: LiveModel,
        levels: Levels,
        check: NonFiniteCheck,
        scaler: GradScaler | None = None,
        counts: Counts | None = None,
    ) -> None:
        self.live = live
        self.levels = levels
        self.check = check
        self.counts = counts
        """What this worker has counted, where means are weighted."""
        self._share: float | None = None
        """What its gradients are multiplied by in this backward."""
        self.wraps: list[Callable[[Codec], Codec]] = []
        """Put around each codec that runs among all workers."""
        self._codec: Codec = Exact()
        self._choice: tuple[Codec, CollectiveQueue, Codec] = (self._codec, levels.world, self._codec)
        """A codec, among whom it was to run, and what `chosen` found for it."""
        self._peers = levels.world.peers
        self.scale = LossScale(scaler, live) if scaler is not None and scaler.is_enabled() else None
        """Where scaled gradients are averaged, and the session knows the scale."""

    @property
    def lacks_scale(self) -> bool:
        """Whether the codec keeps residuals of gradients, and their loss scale is unknown."""
        return self.scale is None and has_feedback(self._codec)

    def begin_step(self, sync: Sync | None, codec: Codec | None) -> None:
        """Use this codec among these workers in the next step."""
        if sync is not None and codec is not None:
            queue = self.levels[sync.level]
            self._codec, self._peers = self.chosen(codec, queue), queue.peers
        if self.scale is not None:
            self.scale.due = True

    def chosen(self, codec: Codec, queue: CollectiveQueue) -> Codec:
        """Return the codec that runs: a worker alone has no peer to save bytes for, but it keeps its momentum."""
        given, among, chosen = self._choice
        if given is not codec or among is not queue:
            chosen = routed(codec) if queue.workers > 1 or contains(codec, TopDCT) else Exact()
            self._choice = codec, queue, chosen
        for wrap in self.wraps if queue is self.levels.world else ():
            chosen = wrap(chosen)
        return chosen

    def weigh(self, queue: CollectiveQueue, header: Header) -> Headers:
        """Exchange headers; where means are weighted, the share of this worker follows from them."""
        headers = exchange_headers(queue, header, self.levels.shards)
        if self.counts is not None:
            shares = headers.shares
            self._share = 1.0 if shares is None else shares[queue.peers.rank]
        return headers

    def weigh_in_backward(self, level: Level, headers: StepHeaders) -> Headers | None:
        """Exchange headers before the first bucket of a backward, if means are weighted."""
        if self.counts is None:
            return None
        return self.weigh(self.levels[level], headers.stop_header(self.counts.of_gradients()))

    def average(
        self, bucket: dict[str, Tensor], codec: Codec | None = None, state: State | None = None, reuse: bool = True
    ) -> Exchange[Averaged]:
        """Average a bucket of gradients, and write the means over it.

        A `codec` and its `state` replace those of the step. Without `reuse`, no tensor of the state is written.
        """
        if self.scale is not None and self.scale.due:
            self.scale.rescale()
        codec = self._codec if codec is None else codec
        state = self.live.state["gradient"] if state is None else state
        # From the inside out: the codec, what an older codec has left, the share of this worker, NaN and Inf.
        exchange = codec.average(bucket, state, self._peers, reuse=reuse)
        if CARRIED in state:
            exchange = deliver(bucket, state, exchange)
        if self._share is not None and self._share != 1:
            exchange = by_share(bucket, self._share, state, exchange)
        end = yield from self.check.watch(bucket, exchange, self._share)
        if end.mean is not bucket:
            write(bucket, end.mean)
        return end


def by_share(
    tensors: Mapping[str, Tensor], share: float, state: State, average: Exchange[Averaged]
) -> Exchange[Averaged]:
    """Multiply `tensors` by this worker's share, in their memory, and run the exchange that averages them.

    The product is computed in fp32. What half precision loses of it, by rounding or beyond the range of fp16, goes to
    the residual, where the codec keeps one. A worker that weighs nothing contributes zeros, whatever it holds.
    """
    lost: dict[str, Tensor] = {}
    if not share:
        zero_all(list(tensors.values()))
    elif all(wide_dtype(t.dtype) == t.dtype for t in tensors.values()):
        multiply_all(list(tensors.values()), share)
    else:
        for name, t in tensors.items():
            product = t.to(wide_dtype(t.dtype)) * share
            t.copy_(narrowed(product, t.dtype))
            if product.dtype != t.dtype:
                lost[name] = product - t
    end = yield from average
    if lost and end.decided:
        return_to_residual(state, lost, end.finite())
    return end


def carry_residuals(old: State) -> State:
    """Return the state of gradients after a change of the codec: the residuals of the old one are to be delivered.

    They are added to the next gradients, in equal portions over 32 steps: the new codec sends them, and keeps what it
    cannot send if it has error feedback. All at once they would make one gradient many times as long as the others, and
    Adam's second moment would shorten the steps after it (docs/log.md, 2026-11-16).
    """
    residuals = residuals_by_name(old)
    return {CARRIED: {"residual": residuals, "parts": dict.fromkeys(residuals, CARRY_STEPS)}} if residuals else {}


def deliver(tensors: Mapping[str, Tensor], state: State, average: Exchange[Averaged]) -> Exchange[Averaged]:
    """Run the exchange that averages `tensors`, with the next portion of carried residuals added in their memory.

    What is lost when a sum is rounded to the dtype of the gradients is not delivered: it stays in the residual. After
    the last portion it moves to the residual of the new codec; without one it is kept for the next change of the plan.
    """
    carried = state.get(CARRIED, {"residual": {}, "parts": {}})
    waiting: dict[str, Tensor] = carried["residual"]
    parts: dict[str, int] = carried["parts"]
    here = [name for name in tensors if parts.get(name)]
    if not here:
        return (yield from average)
    # 1. the portion, added in fp32, and what is left of the residual once it is delivered
    left: dict[str, Tensor] = {}
    with torch.no_grad():
        for name in here:
            t, residual = tensors[name], waiting[name]
            wanted = torch.add(t.to(residual.dtype), residual, alpha=1 / parts[name])
            t.copy_(narrowed(wanted, t.dtype))
            left[name] = residual * (1 - 1 / parts[name]) + (wanted - t)
    # 2. the average; a step that is void has delivered nothing
    end = yield from average
    ok = end.finite() if end.decided else (yield Decide(end.finite()))
    for name in here if bool(ok) else ():
        waiting[name] = left[name]
        parts[name] -= 1
        # 3. after the last portion: what rounding has left
        if not parts[name]:
            rest = waiting.pop(name)
            if tensors[name].dtype != rest.dtype and not return_to_residual(state, {name: rest}):
                waiting[name] = rest
            else:
                del parts[name]
    if not waiting:
        state.pop(CARRIED, None)
    return replace(end, finite=lambda: ok, decided=True)


def sparse_tables(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Find the embeddings whose gradients are sparse, by name."""
    tables = {name: m for name, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    return {name: table for name, table in tables.items() if table.sparse}
