"""WeightSync of weights: what takes part, where deltas start from, and when what was heard takes effect.

Without an anchor, a round replaces weights by their mean, in place. With one, workers exchange deltas
(anchor − weights) through the plan's codec, the outer step moves the anchor, and the weights follow it.
A round commits bucket by bucket as answers come ("streaming"), or all at once at its end ("atomic"): then a round that
fails has changed nothing. A fragment with a delay travels while training goes on, and commits when it is due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from laconic.checks.finite import NonFinite, exchange_headers, mean_of_finite
from laconic.codecs import Exact
from laconic.codecs.contract import wide_dtype
from laconic.codecs.packing import in_buckets, in_parts
from laconic.comm.averaging import average_in_place, write
from laconic.comm.queue import CollectiveQueue
from laconic.comm.requests import Averaged, Exchange, Gather, all_finite
from laconic.plans.plan import Plan
from laconic.plans.schedules import Payload, Streaming, Sync
from laconic.session.model_state import ModelState, copied, flags, local_of
from laconic.session.stop import Stop

Commit: TypeAlias = Literal["streaming", "atomic"]
Anchors: TypeAlias = Literal["device", "cpu"]


@dataclass(frozen=True, eq=False)
class _Job:
    """One bucket of a round: what is said, and what is done with what was heard."""

    exchange: Exchange
    commit: Callable[[Averaged], None]


@dataclass(eq=False)
class _OnItsWay:
    """A fragment that has set out, and the step after which it takes effect."""

    part: int
    due: int
    means: list[dict[str, Tensor]] = field(default_factory=list)
    futures: list[Future[Tensor]] = field(default_factory=list)

    def arrive(self) -> list[dict[str, Tensor]]:
        """Wait for all of it."""
        for future in self.futures:
            future.wait()
        return self.means


class WeightSync:
    """The weights rounds of one model_state."""

    def __init__(
        self,
        model_state: ModelState,
        optimizers: Sequence[Optimizer],
        commit: Commit,
        anchors: Anchors,
        nonfinite: NonFinite = "skip",
    ) -> None:
        if commit not in ("streaming", "atomic"):
            raise ValueError(f'attach(commit={commit!r}): a round commits "streaming", bucket by bucket, or "atomic".')
        if anchors not in ("device", "cpu"):
            raise ValueError(
                f'attach(anchors={anchors!r}): anchors lie where the weights do, "device", or on the "cpu".'
            )
        self.model_state = model_state
        self.stop = Stop()
        self.commit: Commit = commit
        self.anchors: Anchors = anchors
        self.anchor: dict[str, Tensor] | None = None
        self.nonfinite: NonFinite = nonfinite
        self._optimizers = list(optimizers)
        self._scale = 1.0
        self._mute = False
        """Whether this worker has nothing of worth to say in the round under way."""
        self._on_their_way: list[_OnItsWay] = []
        self._parts: dict[int, list[list[str]]] = {}

    @property
    def waiting(self) -> bool:
        """Whether something that was said has not yet taken effect."""
        return bool(self._on_their_way)

    def drop_anchor(self) -> None:
        """Remember the weights of now, which all workers share, as what deltas are taken from."""
        self.anchor = {name: self._anchored(p) for name, p in self.model_state.params.items()}

    def _anchored(self, p: Tensor) -> Tensor:
        wide = wide_dtype(p.dtype)
        if self.anchors == "cpu" and p.device.type != "cpu":
            return torch.empty(p.shape, dtype=wide, pin_memory=p.is_cuda).copy_(p)
        return p.to(wide, copy=True)

    def sync(self, plan: Plan, sync: Sync, step: int) -> None:
        """Take one sync: average, and let it take effect now or when its delay is over."""
        queue = self.model_state.levels[sync.level]
        names = self._names(plan, sync)
        beside = self._beside(plan, queue) if sync.part in (None, 0) else {}
        self._scale = self._open(plan, queue, names, step)
        if plan.needs_anchor and plan.is_outermost(sync):
            delay = plan.schedule.delay if isinstance(plan.schedule, Streaming) else 0
            if delay:
                assert sync.part is not None
                self._set_out(plan, queue, names, sync.part, step + delay)
            else:
                self._run(queue, [self._delta(plan, bucket) for bucket in self._buckets(names)])
            self._average(queue, beside)
        else:
            self._average(queue, {**{name: self.model_state.params[name] for name in names}, **beside})
        if sync.part in (None, 0) and plan.buffers == "leader":
            self._follow_leader(queue)
        if plan.optimizer_state == "reset":
            self._forget(names)

    def _open(self, plan: Plan, queue: CollectiveQueue, names: Iterable[str], step: int) -> float:
        """Exchange headers. A worker whose weights are not finite brings zeros, and the mean is scaled up for it."""
        mine = {name: self.model_state.params[name] for name in names}
        self._mute = False
        finite = self.nonfinite == "ignore" or bool(all_finite(mine))
        heard = exchange_headers(queue, step, plan.text, finite, self.stop.asked, self.model_state.no_words)
        self.stop.heard(heard.stop, queue is self.model_state.queue)
        if all(heard.finite):
            return 1.0
        scale = mean_of_finite(queue, heard.finite, f"step {step}, weights", self.nonfinite)
        if not finite:
            self._mute = True
            for t in (*mine.values(), *self.model_state.buffers.values()):
                t.zero_()
            self._forget(names)  # moments that made such weights
        return scale

    def settle(self, plan: Plan, step: int) -> None:
        """Let what is due by `step` take effect."""
        while self._on_their_way and self._on_their_way[0].due <= step:
            assert isinstance(plan.schedule, Streaming)
            for mean in self._on_their_way[0].arrive():
                self._move(plan, mean, plan.schedule.mix)
            del self._on_their_way[0]

    def average_all(self) -> None:
        """Bring all weights and buffers together exactly, whatever the plan."""
        self._scale, self._mute = 1.0, False
        self._average(self.model_state.queue, {**self.model_state.params, **self.model_state.buffers})

    def forget(self) -> None:
        """Drop the anchor, and what is on its way, without waiting for it."""
        self.forget_the_way()
        self.anchor = None

    def forget_the_way(self) -> None:
        """Drop what is on its way."""
        self._on_their_way = []

    def _names(self, plan: Plan, sync: Sync) -> list[str]:
        if sync.part is None:
            return list(self.model_state.params)
        count = plan.schedule.fragments
        if count not in self._parts:
            self._parts[count] = in_parts(self.model_state.originals, count)  # whole: shards may be uneven
        return self._parts[count][sync.part]

    def _buckets(self, names: Iterable[str]) -> list[list[str]]:
        return in_buckets({name: self.model_state.params[name] for name in names})

    def _average(self, queue: CollectiveQueue, tensors: Mapping[str, Tensor]) -> None:
        if self.commit == "streaming":
            average_in_place(queue, tensors, Payload.WEIGHTS)
        else:
            self._run(queue, [_replacing(bucket) for bucket in _split(tensors)])
        if self._scale != 1 and tensors:
            torch._foreach_mul_(list(tensors.values()), self._scale)

    def _run(self, queue: CollectiveQueue, jobs: Sequence[_Job]) -> None:
        """Run jobs together and wait; a job commits when it ends, or after all have."""
        atomic = self.commit == "atomic"
        ends: list[Averaged | None] = [None] * len(jobs)

        def to_its_end(index: int, job: _Job) -> Exchange:
            end = ends[index] = yield from job.exchange
            if not atomic:
                job.commit(end)
                ends[index] = None
            return end

        state = _same(self.model_state.state["weights"]) if atomic else None
        nothing = torch.empty(0)
        exchanges = [to_its_end(index, job) for index, job in enumerate(jobs)]
        futures = [queue.submit(exchange, Payload.WEIGHTS, nothing) for exchange in exchanges]
        queue.flush()
        try:
            for future in futures:
                future.wait()
        except BaseException:
            if state is not None:
                self.model_state.state["weights"] = state  # what the codec owed before the round, it owes again
            raise
        if atomic:
            with torch.no_grad():
                for job, end in zip(jobs, ends, strict=True):
                    assert end is not None
                    job.commit(end)

    def _delta(self, plan: Plan, names: Sequence[str]) -> _Job:
        scale = self._scale

        def exchange() -> Exchange:
            codec = self.model_state.routed(plan.codec, self.model_state.queue)
            state, reuse = self.model_state.state["weights"], self.commit == "streaming"  # atomic: old tensors are kept
            return (yield from codec.average(self._deltas(names), state, reuse=reuse))

        def commit(end: Averaged) -> None:
            if bool(end.finite()):  # else nobody moves: the round is void on every worker alike
                self._move(plan, _scaled(end.mean, scale), mix=0.0)

        return _Job(exchange(), commit)

    def _deltas(self, names: Iterable[str]) -> dict[str, Tensor]:
        assert self.anchor is not None
        params = self.model_state.params
        wanted = {name: self.anchor[name].to(params[name].device) - params[name] for name in names}
        if self._mute:
            torch._foreach_zero_(list(wanted.values()))
        return wanted

    def _move(self, plan: Plan, mean: Mapping[str, Tensor], mix: float) -> None:
        """Let the outer step move the anchor, and the weights follow it but for the share `mix` of their own."""
        assert self.anchor is not None
        with torch.no_grad():
            anchor = {name: self.anchor[name] for name in mean}
            plan.outer.step(
                anchor, {name: d.to(anchor[name].device) for name, d in mean.items()}, self.model_state.state["outer"]
            )
            for name, a in anchor.items():
                p = self.model_state.params[name]
                p.copy_(a if not mix else torch.lerp(a.to(p.device), p.to(a.dtype), mix))

    def _set_out(self, plan: Plan, queue: CollectiveQueue, names: Sequence[str], part: int, due: int) -> None:
        """Send a fragment on its way; what it hears is kept until it is due."""
        way, scale = _OnItsWay(part, due), self._scale
        codec = self.model_state.routed(plan.codec, queue)
        nothing = torch.empty(0)

        def travel(deltas: Mapping[str, Tensor]) -> Exchange:
            end = yield from codec.average(deltas, self.model_state.state["weights"], reuse=True)
            if bool(end.finite()):
                way.means.append(_scaled(end.mean, scale))
            return end

        with torch.no_grad():
            snapshots = [self._deltas(bucket) for bucket in self._buckets(names)]
        way.futures = [queue.submit(travel(each), Payload.WEIGHTS, nothing) for each in snapshots]
        queue.flush()
        self._on_their_way.append(way)

    def _beside(self, plan: Plan, queue: CollectiveQueue) -> dict[str, Tensor]:
        """Name what is averaged besides weights: buffers and moments, as the plan has it."""
        beside = dict(self.model_state.buffers) if plan.buffers == "average" else {}
        return beside | self._moments(queue) if plan.optimizer_state == "average" else beside

    def _moments(self, queue: CollectiveQueue) -> dict[str, Tensor]:
        """Name the optimizers' moments of parameters that have them on every worker."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, p in self.model_state.originals.items():
            for optimizer in self._optimizers:
                state = optimizer.state.get(p, {})
                like = {k: local_of(t) for k, t in state.items() if isinstance(t, Tensor) and t.shape == p.shape}
                found.setdefault(name, {}).update({f"moment:{key}:{name}": t for key, t in like.items()})
        here = torch.tensor([float(bool(found[name])) for name in found])
        if queue.workers > 1:
            here = queue.run(flags(here.to(queue.device)), "control").mean["flags"]
        everywhere = [name for name, share in zip(found, here.tolist(), strict=True) if share == 1]
        return {key: t for name in everywhere for key, t in found[name].items() if t.is_floating_point()}

    def _follow_leader(self, queue: CollectiveQueue) -> None:
        """Give every worker the buffers of the first."""
        jobs = [_Job(_first(bucket), _writing(bucket)) for bucket in _split(self.model_state.all_buffers)]
        if queue.workers > 1:
            self._run(queue, jobs)

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            for optimizer in self._optimizers:
                if self.model_state.originals[name] in optimizer.state:
                    optimizer.state[self.model_state.originals[name]].clear()

    def state_dict(self) -> dict[str, Any]:
        """What this worker must save of its rounds. Waits for what is on its way."""
        way = [{"part": each.part, "due": each.due, "means": each.arrive()} for each in self._on_their_way]
        return {"anchor": self.anchor, "way": way}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.anchor = None
        if saved["anchor"] is not None:
            self.anchor = {name: self._anchored(p) for name, p in self.model_state.params.items()}
            write(self.anchor, saved["anchor"])
        self._on_their_way = [
            _OnItsWay(each["part"], each["due"], [copied(mean, self.model_state.devices) for mean in each["means"]])
            for each in saved.get("way", [])
        ]


def _scaled(mean: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    return dict(mean) if scale == 1 else {name: t * scale for name, t in mean.items()}


def _replacing(tensors: Mapping[str, Tensor]) -> _Job:
    return _Job(Exact(wide=True).average(tensors, {}), _writing(tensors))


def _writing(tensors: Mapping[str, Tensor]) -> Callable[[Averaged], None]:
    return lambda end: write(tensors, end.mean)


def _first(tensors: Mapping[str, Tensor]) -> Exchange:
    """Hear all workers, and keep what the first said."""
    flat = torch.cat([t.reshape(-1) for t in tensors.values()])
    rows = yield Gather(flat)
    parts = rows[0].split([t.numel() for t in tensors.values()])
    mean = {name: part.view(t.shape) for (name, t), part in zip(tensors.items(), parts, strict=True)}
    return Averaged(mean, dict, lambda: torch.tensor(True))


def _same(nest: Any) -> Any:
    """Copy a nest of dicts, but not the tensors in it."""
    return {key: _same(value) for key, value in nest.items()} if isinstance(nest, Mapping) else nest


def _split(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: tensors[name] for name in names} for names in in_buckets(tensors)]
