"""Synchronising weights: what is averaged, where deltas start from, and when a mean takes effect.

Without an anchor, weights are replaced by their mean, in place. With one, workers exchange deltas (anchor − weights)
through the plan's codec, the outer step moves the anchor, and the weights follow it. A synchronisation takes effect
bucket by bucket ("streaming"), or all at once at its end ("atomic"): then one that fails has changed nothing. A
fragment with a delay is averaged while training goes on, and takes effect when it is due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.checks.finite import NonFinite, scale_without
from laconic.checks.headers import exchange_headers
from laconic.codecs import Codec, Exact
from laconic.comm.averaging import average_in_place, write
from laconic.comm.groups import Levels
from laconic.comm.queue import CollectiveQueue
from laconic.exchange import Averaged, Exchange, all_finite, by_itself
from laconic.packing import bucketed, in_buckets, in_parts
from laconic.plans.plan import Plan
from laconic.plans.schedules import Payload, Streaming, Sync
from laconic.session.anchor import Anchor, Anchors
from laconic.session.extra_state import ExtraState, flat
from laconic.session.in_flight import InFlight
from laconic.session.model_state import ModelState, of_worker, same_tensors
from laconic.session.stop import StepHeaders

Commit: TypeAlias = Literal["streaming", "atomic"]


@dataclass(frozen=True, eq=False)
class _Job:
    """One bucket of a synchronisation: its exchange, and what is done with the result."""

    exchange: Exchange[Any]
    commit: Callable[[Any], None]


class WeightSync:
    """Synchronises the weights of one model, and what belongs to them: buffers and optimizer state."""

    def __init__(
        self,
        model_state: ModelState,
        levels: Levels,
        optimizers: Sequence[Optimizer],
        commit: Commit,
        anchors: Anchors,
        nonfinite: NonFinite,
        chosen: Callable[[Codec, CollectiveQueue], Codec],
    ) -> None:
        if commit not in ("streaming", "atomic"):
            raise ValueError(
                f'attach(commit={commit!r}): weights are committed "streaming", bucket by bucket, or "atomic".'
            )
        self.model_state = model_state
        self.levels = levels
        self.commit: Commit = commit
        self.anchor = Anchor(model_state, anchors)
        self.nonfinite: NonFinite = nonfinite
        self._extras = ExtraState(model_state, optimizers)
        self._chosen = chosen
        self._scale = 1.0
        """The factor for the means of the synchronisation in progress: workers with NaN contribute zeros."""
        self._excluded = False
        """Whether this worker contributes zeros."""
        self._in_flight = InFlight(model_state, self.anchor)
        self._parts: dict[tuple[int, int], list[list[str]]] = {}

    @property
    def in_flight(self) -> bool:
        """Whether a fragment was sent and has not taken effect."""
        return bool(self._in_flight)

    def sync(self, plan: Plan, sync: Sync, headers: StepHeaders) -> None:
        """Average as `sync` says, and let it take effect now or when its delay is over."""
        self.model_state.refresh()
        queue = self.levels[sync.level]
        names = self._names(plan, sync)
        first = sync.part in (None, 0)
        anchored = plan.needs_anchor and plan.is_outermost(sync)
        buffers, moments = self._extras.of(plan) if first else ({}, {})
        extra = {**buffers, **flat(moments)}
        watched = extra | self.model_state.buffers if first and plan.buffers == "leader" else extra
        finite = self._exchange_headers(queue, extra, watched, headers, anchored)
        # Also other fragments, where one worker has lost them: NaN is in all of them after one more step.
        among = names if all(finite) else list(self.model_state.params)
        extra = {**buffers, **self._extras.common(moments, queue, reset_others=self._excluded)}
        deltas = [name for name in names if anchored and self.anchor.has(name)]
        exact = {name: self.model_state.params[name] for name in among if not (anchored and self.anchor.has(name))}
        if anchored:
            self._sync_deltas(plan, queue, deltas, sync, headers.step)
        self._average(queue, {**exact, **extra})
        if anchored:
            self.anchor.add(exact)
        names = [*deltas, *exact]
        if first and plan.buffers == "leader" and queue.workers > 1:
            split = bucketed(self.model_state.all_buffers)
            self._run(queue, [_Job(of_worker(b, finite.index(True)), partial(write, b)) for b in split])
        if plan.optimizer_state == "reset":
            self._extras.reset_optimizers(names)
        if queue is self.levels.world:
            self.model_state.mark_synced(names)

    def _sync_deltas(self, plan: Plan, queue: CollectiveQueue, names: Sequence[str], sync: Sync, step: int) -> None:
        if isinstance(plan.schedule, Streaming) and plan.schedule.delay:
            assert sync.part is not None
            self._send(plan, queue, names, sync.part, step)
            return
        self.anchor.is_current = sync.part is None
        self._run(queue, [self._delta_job(plan, queue, bucket) for bucket in self._buckets(names)])

    def _exchange_headers(
        self,
        queue: CollectiveQueue,
        extra: Mapping[str, Tensor],
        watched: Mapping[str, Tensor],
        headers: StepHeaders,
        anchored: bool,
    ) -> list[bool]:
        """Exchange headers; return which workers have finite numbers.

        A worker that has not, also in another fragment, goes back to the anchor, and contributes no delta. Without an
        anchor it contributes zeros. The means are scaled up for it.
        """
        params = self.model_state.params
        self._scale, self._excluded = 1.0, False
        by_design = self.model_state.nonfinite_by_design
        looked_at = {name: t for name, t in {**params, **watched}.items() if name not in by_design}
        finite = self.nonfinite == "ignore" or bool(all_finite(looked_at))
        received = exchange_headers(queue, headers.header(finite=finite))
        headers.received(received, among_all=queue is self.levels.world)
        if all(received.finite):
            return received.finite
        self._scale = scale_without(queue, received.finite, f"step {headers.step}, weights", self.nonfinite)
        if not finite:
            self._excluded = True
            torch._foreach_zero_([*params.values(), *extra.values()])
            if anchored:
                self.anchor.restore()
                self._in_flight.restart()
            if not any(key.startswith("moment:") for key in extra):
                self._extras.reset_optimizers(params)  # moments that made such weights
        return received.finite

    def settle(self, plan: Plan, step: int) -> None:
        """Let fragments that are due by `step` take effect."""
        self._in_flight.settle(plan, step, self.levels.world.ledger)

    def average_all(self, headers: StepHeaders, optimizers: bool) -> None:
        """Average all weights and buffers exactly, whatever the plan, and the state of the optimizers if asked."""
        self.model_state.refresh()
        world, buffers = self.levels.world, self.model_state.buffers
        moments = self._extras.moments() if optimizers else {}
        extra = {**buffers, **flat(moments)}
        self._exchange_headers(world, extra, extra, headers, anchored=False)
        common = self._extras.common(moments, world, reset_others=True)
        self._average(world, {**self.model_state.params, **buffers, **common})
        if optimizers:
            self._extras.equal_counters(world)
        self.model_state.mark_synced(self.model_state.params)

    def forget(self) -> None:
        """Drop the anchor, and fragments in flight, without waiting for them."""
        self.drop_in_flight()
        self.anchor.forget()

    def drop_in_flight(self) -> None:
        """Drop fragments in flight."""
        self._in_flight.drop()

    def _names(self, plan: Plan, sync: Sync) -> list[str]:
        if sync.part is None:
            return list(self.model_state.params)
        key = (plan.schedule.fragments, self.model_state.facts.digest)
        if key not in self._parts:  # by whole sizes: shards may be uneven
            self._parts[key] = in_parts(self.model_state.originals, plan.schedule.fragments)
        return self._parts[key][sync.part]

    def _buckets(self, names: Iterable[str]) -> list[list[str]]:
        return in_buckets({name: self.model_state.params[name] for name in names})

    def _average(self, queue: CollectiveQueue, tensors: Mapping[str, Tensor]) -> None:
        if self.commit == "streaming":
            average_in_place(queue, tensors, Payload.WEIGHTS)
        else:
            exact = Exact(wide=True)
            jobs = [_Job(exact.average(b, {}, queue.peers), _writing(b)) for b in bucketed(tensors)]
            self._run(queue, jobs)
        if self._scale != 1 and tensors:
            torch._foreach_mul_(list(tensors.values()), self._scale)

    def _run(self, queue: CollectiveQueue, jobs: Sequence[_Job]) -> None:
        """Run jobs together and wait; a job takes effect when it ends, or after all have."""
        atomic = self.commit == "atomic"
        ends: list[Any] = [None] * len(jobs)

        def run(index: int, job: _Job) -> Exchange[Any]:
            end = ends[index] = yield from job.exchange
            if not atomic:
                job.commit(end)
                ends[index] = None
            return end

        before = same_tensors(self.model_state.state["weights"]) if atomic else None
        try:
            queue.run_all([run(index, job) for index, job in enumerate(jobs)], Payload.WEIGHTS)
        except BaseException:
            if before is not None:
                self.model_state.state["weights"] = before  # residuals are as before the synchronisation
            raise
        if atomic:
            with torch.no_grad():
                for job, end in zip(jobs, ends, strict=True):
                    job.commit(end)

    def _delta_job(self, plan: Plan, queue: CollectiveQueue, names: Sequence[str]) -> _Job:
        scale, zero = self._scale, self._excluded

        def exchange() -> Exchange[Averaged]:
            codec = self._chosen(plan.codec, self.levels.world)
            state, reuse = self.model_state.state["weights"], self.commit == "streaming"  # atomic keeps old tensors
            deltas = self.anchor.deltas(names, zero)
            return (yield from by_itself(codec.average(deltas, state, queue.peers, reuse=reuse)))

        def commit(end: Averaged) -> None:
            if bool(end.finite()):
                self.anchor.move(plan.outer, _scaled(end.mean, scale))
            else:  # no worker moves: the synchronisation has no effect, the same on all
                self.anchor.is_current = False

        return _Job(exchange(), commit)

    def _send(self, plan: Plan, queue: CollectiveQueue, names: Sequence[str], part: int, step: int) -> None:
        """Send a fragment; its means are kept until it is due."""
        assert isinstance(plan.schedule, Streaming)
        fragment, scale = self._in_flight.new(plan.schedule, part, step, names), self._scale
        codec = self._chosen(plan.codec, queue)

        def exchange(deltas: Mapping[str, Tensor]) -> Exchange[Averaged]:
            state = self.model_state.state["weights"]
            end = yield from by_itself(codec.average(deltas, state, queue.peers, reuse=True))
            if bool(end.finite()):
                fragment.means.append(_scaled(end.mean, scale))
            return end

        with torch.no_grad():
            snapshots = [self.anchor.deltas(bucket, self._excluded) for bucket in self._buckets(names)]
        nothing = torch.empty(0)
        fragment.futures = [queue.submit(exchange(each), Payload.WEIGHTS, nothing) for each in snapshots]
        queue.flush(waits=False)

    def state_dict(self) -> dict[str, Any]:
        """Return anchor and fragments in flight. Waits for these."""
        return {"anchor": self.anchor.shared(), "in_flight": self._in_flight.state()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.anchor.load(saved["anchor"])
        self._in_flight.load(saved["in_flight"])


def _scaled(mean: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    return dict(mean) if scale == 1 else {name: t * scale for name, t in mean.items()}


def _writing(tensors: Mapping[str, Tensor]) -> Callable[[Averaged], None]:
    return lambda end: write(tensors, end.mean)
