"""Synchronising weights, as in local SGD and DiLoCo.

Without an anchor, weights are replaced by their mean, in place. With one, the weights that all workers shared last,
workers exchange deltas (anchor − weights) through the plan's codec, the outer step moves the anchor by the mean delta,
and the weights follow it. The phases of a synchronisation, as numbered below:

    1 who takes part   2 headers   3 deltas   4 exchange   5 outer step   6 what arrives late

It takes effect bucket by bucket ("streaming"), or all at once at its end ("atomic"): then one that fails has changed
nothing. A fragment with a delay is averaged while training goes on, and takes effect when it is due.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.futures import Future

from laconic.checks.finite import scale_without
from laconic.checks.headers import exchange_headers
from laconic.codecs.feedback import residuals_by_name
from laconic.comm.averaging import write
from laconic.comm.queue import CollectiveQueue
from laconic.exchange import Averaged, Exchange, all_finite, by_itself
from laconic.packing import in_buckets, in_fragments, wide_dtype
from laconic.plans.outer import Outer
from laconic.plans.plan import Plan
from laconic.plans.schedules import Payload, Streaming, Sync
from laconic.session.gradients import GradientAverager
from laconic.session.live_model import Commit, copied, flat, same_tensors
from laconic.session.step_headers import StepHeaders
from laconic.torch_private.foreach import multiply_all, zero_all

logger = logging.getLogger(__name__)

Anchors: TypeAlias = Literal["device", "cpu"]


@dataclass(eq=False)
class Fragment:
    """A fragment in flight, and the step after which it takes effect."""

    names: list[str]
    due: int
    sent: dict[str, Tensor]
    """This worker's weights when it sent its deltas; empty unless it keeps what they move meanwhile (mix=None)."""
    means: list[dict[str, Tensor]] = field(default_factory=list)
    futures: list[Future[Tensor]] = field(default_factory=list)

    def wait(self) -> list[dict[str, Tensor]]:
        """Return the mean deltas, when all have arrived."""
        for future in self.futures:
            future.wait()
        return self.means


@dataclass(frozen=True, eq=False)
class Contributors:
    """Whose numbers are finite, by the headers of one synchronisation: the others contribute zeros."""

    finite: list[bool]
    scale: float = 1.0
    """The factor for means, so that zeros do not count."""
    excluded: bool = False
    """Whether this worker contributes zeros."""
    shares: tuple[float, ...] | None = None
    """What the tensors of each worker are multiplied by, where means are weighted and not all workers weigh the same.

    Whose numbers are not finite weighs 0: then means need no factor.
    """
    share: float = 1.0
    """That of this worker."""


def check_choices(commit: object, anchors: object = "device") -> None:
    """Refuse an unknown way to commit, and an unknown place of anchors."""
    if commit not in ("streaming", "atomic"):
        raise ValueError(
            f'attach(commit={commit!r}): weights are committed "streaming", bucket by bucket, or "atomic".'
        )
    if anchors not in ("device", "cpu"):
        raise ValueError(f'attach(anchors={anchors!r}): anchors are on the "device" of the weights, or on the "cpu".')


class WeightSync:
    """Synchronises the weights of one model, and what belongs to them: buffers and moments."""

    def __init__(self, averager: GradientAverager, commit: Commit, anchors: Anchors) -> None:
        self.live, self._counts = averager.live, averager.counts
        self._averager = averager
        """What weights and gradients have in common: the groups, which codec runs, the policy for NaN and Inf."""
        self.commit: Commit = commit
        self._anchors: Anchors = anchors
        self._anchor: dict[str, Tensor] | None = None
        """By name, in fp32 or wider; None until the first step of a plan that needs it."""
        self._is_current = False
        """Whether the last synchronisation set the weights to the anchor, and no step was taken since."""
        self.in_flight: list[Fragment] = []
        """Fragments that were sent and have not taken effect, oldest first."""
        self._fragments: dict[tuple[int, int], list[list[str]]] = {}
        """The names in each fragment, by the number of fragments and the digest of the model's facts."""

    def begin_step(self, first: bool) -> None:
        """Take the anchor before the first step, and again if other code has changed the weights after a round."""
        changed = False
        if self._anchor is not None and first and self._is_current:
            self.live.refresh()
            pairs = [(self._anchor[name], p) for name, p in self.live.params.items() if name in self._anchor]
            changed = any((a.to(p.device, p.dtype) != p).any().cpu() for a, p in pairs)
        if changed:
            logger.warning("Weights have changed since they were synchronised: deltas start from those of now.")
        if changed or self._anchor is None:
            self.live.refresh()
            self._anchor = self._wide_copies(self.live.params)
        self._is_current = False

    def sync(self, plan: Plan, sync: Sync, headers: StepHeaders) -> dict[str, Tensor]:
        """Average as `sync` says, and let it take effect now or when its delay is over.

        Return what all workers of its level must now hold alike: of a fragment with a delay, nothing yet.
        """
        live, levels = self.live, self._averager.levels
        queue = levels[sync.level]
        live.refresh()
        # 1. Who takes part: the parameters of this fragment; with the first one, buffers and moments.
        names = list(live.params) if sync.fragment is None else self._names(plan, sync.fragment)
        first = sync.fragment in (None, 0)
        anchored = plan.needs_anchor and plan.is_outermost(sync)
        buffers = dict(live.buffers) if first and plan.buffers == "average" else {}
        moments = live.moments() if first and plan.optimizer_state == "average" else {}
        leads = first and plan.buffers == "leader" and queue.workers > 1
        with_anchor = self._with_anchor() if anchored else set()
        # 2. Headers: stop at a worker that is out of step, and find whose numbers are finite. Only what may be sent
        # is looked at: NaN in another fragment is in all of them after one more step.
        extra = buffers | flat(moments) if moments else buffers
        elsewhere = with_anchor.difference(names)
        sent = {name: p for name, p in live.params.items() if name not in elsewhere}
        sent |= extra | (live.buffers if leads else {})
        count = None if self._counts is None else self._counts.of_weights(plan, sync)
        contributors = self._exchange_headers(queue, sent, extra, headers, anchored, count)
        among = names if all(contributors.finite) else live.params
        common = live.common_moments(queue, moments, reset_others=contributors.excluded) if moments else {}
        deltas = [name for name in names if name in with_anchor]
        exact = {name: live.params[name] for name in among if name not in with_anchor}
        # 3. to 6. What has an anchor travels as deltas, through the plan's codec.
        late = anchored and isinstance(plan.schedule, Streaming) and plan.schedule.delay > 0
        if late:
            self._send(plan, queue, deltas, headers.step, contributors)
        elif anchored:
            self._is_current = sync.fragment is None
            self._run(plan, queue, deltas, contributors)
        # What has none is averaged exactly: weights of plans without an anchor, new parameters, buffers, moments.
        live.average(queue, {**exact, **buffers, **common}, self.commit, contributors.shares, contributors.scale)
        if anchored and self._anchor is not None:
            self._anchor |= self._wide_copies(exact)  # all workers share these now
        if leads:
            worker = contributors.finite.index(True)
            live.take_from(worker, queue, live.all_buffers, Payload.WEIGHTS, self.commit)
        if plan.optimizer_state == "reset":
            live.reset_optimizers([*deltas, *exact])
        if queue is levels.world:
            live.mark_synced([*deltas, *exact])
        if self._counts is not None:
            self._counts.synced(plan, sync)
        if sync.fragment is None:
            return live.params
        return {} if late else self._shared(names)

    def average_all(self, plan: Plan, headers: StepHeaders, optimizers: bool) -> None:
        """Average all weights and buffers exactly, whatever the plan, and the moments of the optimizers if asked."""
        live, world = self.live, self._averager.levels.world
        live.refresh()
        moments = live.moments() if optimizers else {}
        extra = {**live.buffers, **flat(moments)}
        count = None if self._counts is None else self._counts.of_all_weights(plan)
        sent = {**live.params, **extra}
        contributors = self._exchange_headers(world, sent, extra, headers, anchored=False, count=count)
        common = live.common_moments(world, moments, reset_others=True)
        averaged = {**live.params, **live.buffers, **common}
        live.average(world, averaged, self.commit, contributors.shares, contributors.scale)
        if optimizers:
            live.equal_counters(world)
        live.mark_synced(live.params)
        if self._counts is not None:
            self._counts.all_synced()

    # 1. Who takes part

    def _names(self, plan: Plan, fragment: int) -> list[str]:
        key = (plan.schedule.fragments, self.live.facts.digest)
        if key not in self._fragments:  # by whole sizes: shards may be uneven
            self._fragments[key] = in_fragments(self.live.originals, plan.schedule.fragments)
        return self._fragments[key][fragment]

    def _shared(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return what all workers hold alike of a fragment that took effect: the weights may have local steps in them.

        That is the anchor, or the weights where there is none.
        """
        anchor, with_anchor = self._anchor or {}, self._with_anchor()
        held = {name: anchor[name] if name in with_anchor else p for name, p in self.live.params.items()}
        return {name: held[name] for name in names if name in held}

    # 2. Headers

    def _exchange_headers(
        self,
        queue: CollectiveQueue,
        sent: Mapping[str, Tensor],
        extra: Mapping[str, Tensor],
        headers: StepHeaders,
        anchored: bool,
        count: int | None,
    ) -> Contributors:
        """Exchange headers: whose numbers are finite among those that are `sent`, of which `extra` are no weights.

        A worker whose are not goes back to the anchor, and contributes no delta. Without an anchor it contributes
        zeros. The means are scaled up for it, unless they are weighted: then it weighs 0.
        """
        live, levels, policy = self.live, self._averager.levels, self._averager.check.policy
        looked_at = {name: t for name, t in sent.items() if name not in live.nonfinite_by_design}
        finite = policy == "ignore" or bool(all_finite(looked_at))
        received = exchange_headers(queue, headers.header(finite=finite, count=count), levels.shards)
        headers.received(received, among_all=queue is levels.world)
        plain = received.all[0].count is None
        weighed = None if plain else received.shares
        share = 1.0 if weighed is None else weighed[queue.peers.rank]
        if all(received.finite):
            return Contributors(received.finite, shares=weighed, share=share)
        each = "worker" if levels.shards is None else "replica"
        scale = scale_without(queue, received.finite, f"{received.all[0].when}, weights", policy, each)
        excluded = not received.finite[queue.peers.rank]  # also if only another shard of this replica is not finite
        if excluded:
            zero_all([*live.params.values(), *extra.values()])
            if anchored:
                self._restore_anchor()
            if not any(key.startswith("moment:") for key in extra):
                live.reset_optimizers(live.params)  # moments that made such weights
        return Contributors(received.finite, scale if plain else 1.0, excluded, weighed, share)

    # 3. Deltas

    def _deltas(self, names: Iterable[str], contributors: Contributors) -> dict[str, Tensor]:
        """Return anchor − weights, times the share of this worker; zeros if it contributes nothing."""
        anchor, params = self._anchor, self.live.params
        assert anchor is not None
        if contributors.excluded or not contributors.share:
            return {name: torch.zeros_like(anchor[name], device=params[name].device) for name in names}
        deltas = {name: anchor[name].to(params[name].device) - params[name] for name in names}
        if contributors.share != 1 and deltas:
            multiply_all(list(deltas.values()), contributors.share)
        return deltas

    # 4. Exchange

    def _run(self, plan: Plan, queue: CollectiveQueue, names: Iterable[str], contributors: Contributors) -> None:
        """Average deltas, and let them take effect: each bucket when it has arrived, or all after the last."""
        codec, state = self._averager.chosen(plan.codec, queue), self.live.state["weights"]
        atomic = self.commit == "atomic"
        mix = plan.schedule.mix if isinstance(plan.schedule, Streaming) else None
        means: list[dict[str, Tensor]] = []

        def exchange(bucket: list[str]) -> Exchange[None]:
            deltas = self._deltas(bucket, contributors)
            # Not in their memory where "atomic" may still need the old residuals.
            end = yield from by_itself(codec.average(deltas, state, queue.peers, reuse=not atomic))
            if not bool(end.finite()):  # no worker moves: the synchronisation has no effect, the same on all
                self._is_current = False
            elif atomic:
                means.append(_scaled(end.mean, contributors.scale))
            else:
                self._move(plan.outer, _scaled(end.mean, contributors.scale), mix or 0.0)

        before = same_tensors(state) if atomic else None
        buckets = in_buckets({name: self.live.params[name] for name in names})
        try:
            queue.run_all([exchange(bucket) for bucket in buckets], Payload.WEIGHTS)
        except BaseException:
            if before is not None:
                self.live.state["weights"] = before
            raise
        for mean in means:
            self._move(plan.outer, mean, mix or 0.0)  # without a delay, None adds no steps

    # 5. Outer step

    @torch.no_grad()
    def _move(
        self,
        outer: Outer,
        mean: Mapping[str, Tensor],
        mix: float | None,
        sent: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take the outer step from the anchor; the weights become the anchor, but for the share `mix` of their own.

        With mix=None they keep all that they have moved since `sent`, this worker's weights when it sent its deltas.
        """
        assert self._anchor is not None
        params = self.live.params
        anchor = {name: self._anchor[name] for name in mean if name in params}
        deltas = {name: mean[name].to(a.device) for name, a in anchor.items()}
        outer.step(anchor, deltas, self.live.state["outer"])
        for name, a in anchor.items():
            p = params[name]
            if mix is None:
                assert sent is not None
                p.copy_(a.to(p.device) + (p.to(a.dtype) - sent[name]))
            else:
                p.copy_(a if not mix else torch.lerp(a.to(p.device), p.to(a.dtype), mix))

    # 6. What arrives late

    def _send(
        self,
        plan: Plan,
        queue: CollectiveQueue,
        names: list[str],
        step: int,
        contributors: Contributors,
    ) -> None:
        """Send a fragment; its means are kept until it is due."""
        assert isinstance(plan.schedule, Streaming)
        params = self.live.params
        own = {name: params[name].detach().clone() for name in names} if plan.schedule.mix is None else {}
        fragment = Fragment(names, step + plan.schedule.delay, own)
        self.in_flight.append(fragment)
        # As they are now: another state may be loaded before the queue's thread comes to this exchange.
        chosen, state = self._averager.chosen(plan.codec, queue), self.live.state["weights"]

        def exchange(deltas: Mapping[str, Tensor]) -> Exchange[Averaged]:
            end = yield from by_itself(chosen.average(deltas, state, queue.peers, reuse=True))
            if bool(end.finite()):
                fragment.means.append(_scaled(end.mean, contributors.scale))
            return end

        with torch.no_grad():
            buckets = in_buckets({name: params[name] for name in names})
            snapshots = [self._deltas(bucket, contributors) for bucket in buckets]
        nothing = torch.empty(0)
        fragment.futures = [queue.submit(exchange(each), Payload.WEIGHTS, nothing) for each in snapshots]
        queue.flush(waits=False)

    def settle(self, plan: Plan, step: int) -> dict[str, Tensor]:
        """Let fragments that are due by `step` take effect; return what all workers must now hold alike of them."""
        shared: dict[str, Tensor] = {}
        while self.in_flight and self.in_flight[0].due <= step:
            assert isinstance(plan.schedule, Streaming)
            self.live.refresh()
            oldest, since_s = self.in_flight[0], time.perf_counter()
            means = oldest.wait()
            self._averager.levels.world.ledger.add_wait(since_s)
            for mean in means:
                self._move(plan.outer, mean, plan.schedule.mix, oldest.sent)
            shared |= self._shared(oldest.names)
            del self.in_flight[0]
        return shared

    # The anchor

    def _wide_copies(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy parameters as an anchor."""
        copies: dict[str, Tensor] = {}
        for name, p in params.items():
            if self._anchors == "cpu" and p.device.type != "cpu":
                empty = torch.empty(p.shape, dtype=wide_dtype(p.dtype), pin_memory=p.is_cuda)
                copies[name] = empty.copy_(p)
            else:
                copies[name] = p.to(wide_dtype(p.dtype), copy=True)
        return copies

    def _with_anchor(self) -> set[str]:
        """Return the parameters whose deltas are taken: not those that came since the last round, or were frozen."""
        known = (self._anchor or {}).keys() - self.live.unsynced
        return {name for name, p in self.live.originals.items() if name in known and p.requires_grad}

    @torch.no_grad()
    def _restore_anchor(self) -> None:
        """Set the weights to the anchor. What fragments in flight have moved counts from there."""
        anchor, params = self._anchor or {}, self.live.params
        for name in self._with_anchor():
            params[name].copy_(anchor[name])
        for fragment in self.in_flight:
            fragment.sent = {name: params[name].detach().clone() for name in fragment.sent if name in params}

    @torch.no_grad()
    def apply_residuals(self) -> None:
        """Subtract this worker's residuals of deltas from its weights: no codec will deliver them."""
        self.live.refresh()
        for name, residual in residuals_by_name(self.live.state["weights"]).items():
            if name in self.live.params:
                self.live.params[name].sub_(residual.to(self.live.params[name].device))

    # What is saved

    def forget(self) -> None:
        """Drop the anchor, and fragments in flight, without waiting for them: the next step takes another anchor."""
        self.in_flight, self._anchor = [], None

    def state_dict(self) -> dict[str, Any]:
        """Return the anchor, where it is the same on all workers, and fragments in flight. Waits for these."""
        new = self.live.unsynced
        anchor = None if self._anchor is None else {name: a for name, a in self._anchor.items() if name not in new}
        fragments = [
            {"names": each.names, "due": each.due, "sent": each.sent, "means": each.wait()} for each in self.in_flight
        ]
        return {"anchor": anchor, "in_flight": fragments}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._is_current, self._anchor = False, None
        if saved["anchor"] is not None:
            self.live.refresh()
            self._anchor = self._wide_copies({n: p for n, p in self.live.params.items() if n in saved["anchor"]})
            write(self._anchor, saved["anchor"])
        devices = self.live.devices
        self.in_flight = [
            Fragment(
                each["names"], each["due"], copied(each["sent"], devices), [copied(x, devices) for x in each["means"]]
            )
            for each in saved["in_flight"]
        ]


def _scaled(mean: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    return dict(mean) if scale == 1 else {name: t * scale for name, t in mean.items()}
