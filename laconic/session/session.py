"""The session: a plan at work on a model and its optimizers.

    session = laconic.attach(laconic.power_sgd(rank=4), model, optimizer)

The training loop does not change. DDP and FSDP2 models average gradients in backward, bare modules at the optimizer's
step. Weights are synchronised right after it. A step in which nothing is synchronised sends nothing, DDP's own
broadcasts included. Steps count from 1. Several optimizers step in any order: a step is over when each has stepped
once.
"""

from __future__ import annotations

import copy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from laconic.checks.agreement import agree
from laconic.checks.digests import DivergenceCheck
from laconic.checks.finite import NonFinite, check_policy
from laconic.checks.headers import NOT_COUNTED, Headers
from laconic.codecs import Codec
from laconic.codecs.feedback import has_feedback
from laconic.ledger import Ledger
from laconic.plans.plan import Plan
from laconic.plans.schedules import Payload, Quadratic, Sync, SyncClock, Timed
from laconic.plans.text import plan as parse_plan
from laconic.session.foreign import OtherOptimizers, check_first_step, optimizer_inside, warn_of_lost_state
from laconic.session.gradients import GradientAverager, GradientPath, carry_residuals
from laconic.session.live_model import Commit, facts_of_model
from laconic.session.metrics import Health, Reported, metrics_of
from laconic.session.observers import StepObserver, Validation
from laconic.session.scaling import Arguments, Clipping, ScaledSteps, run_when_ready
from laconic.session.step_headers import Counts, Rounds, StepHeaders, check_rounds
from laconic.session.weights import WeightSync, check_choices
from laconic.torch_private.steps import always_call, call_as_before, is_nested_step


class Stateful(Protocol):
    """An object whose state can be saved, such as a sampler or a scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Restore it."""
        ...


class Session:
    """A plan at work; `laconic.attach` makes it. A context manager: leaving it detaches."""

    def __init__(
        self,
        plan: Plan,
        given: Plan,
        path: GradientPath,
        averager: GradientAverager,
        weights: WeightSync,
        headers: StepHeaders,
        scaled: Sequence[ScaledSteps],
        clipping: Clipping,
        divergence: DivergenceCheck,
        ledger: Ledger,
    ) -> None:
        self.plan = plan
        """The plan. Of one that is named by a target of bytes, what it became on this model."""
        self.given = given
        """The plan as it was given: `plan` itself, or the target that became it."""
        self.ledger = ledger
        """What was sent, and when."""
        self.step = 0
        """Optimizer steps of the run, those before a resume included. Of this worker, where rounds end by the clock."""
        self.health: Health | None = None
        """What a `laconic.Guard` has measured last; None without one."""
        self._path, self._averager, self._weights, self._headers = path, averager, weights, headers
        self._live, self._levels, self._counts = averager.live, averager.levels, averager.counts
        self._scaled, self._clipping, self._divergence = list(scaled), clipping, divergence
        self._clock = SyncClock(since=plan.schedule.start - 1)
        headers.rounds = Rounds() if isinstance(plan.schedule, Timed) else None
        # Of the step that comes next, set by `_prepare`
        self._syncs: tuple[Sync, ...] = ()
        self._gradient: Sync | None = None
        """How gradients are averaged in it, if they are."""
        self._waiting: list[ScaledSteps] = []
        """The optimizers that have yet to step in it."""
        self._void: Tensor | bool = False
        """Whether its gradients were not finite, so that no optimizer may step any more; 1.0 or 0.0 if known late."""
        self._first = True
        """Whether this session has seen no step yet."""
        self._kept: dict[str, Stateful] = {}
        self._unclaimed: dict[str, Any] = {}
        """States that were loaded, of objects that `keep` has yet to be given."""
        self._removals: list[Callable[[], None]] = []
        self._reported = Reported()
        self._observers: list[StepObserver] = [self._reported]

    # What it is doing

    @property
    def attached(self) -> bool:
        """Whether its hooks are installed: from the end of `attach` until `detach`."""
        return bool(self._removals)

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self._levels.world.workers

    @property
    def worker(self) -> int:
        """Which of them this worker is, from 0."""
        return self._levels.world.peers.rank

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group that the session uses for all workers; None in a world of one."""
        return self._levels.world.group

    @property
    def timeout_s(self) -> float | None:
        """How long the next collective among all workers may take; None in a world of one, and over NCCL."""
        return None if (timeout := self._levels.world.timeout) is None else timeout.limit_s

    @property
    def optimizers(self) -> list[Optimizer]:
        """The torch optimizers whose steps the session counts, without what a framework has put around them."""
        return [each.optimizer for each in self._scaled]

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The trained parameters by name, as the model and the optimizers know them."""
        self._live.refresh()
        return self._live.originals

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The floating-point buffers by name."""
        self._live.refresh()
        return self._live.buffers

    @property
    def kept(self) -> Mapping[str, Stateful]:
        """What `keep` was given, by name."""
        return dict(self._kept)

    @property
    def sharded(self) -> bool:
        """Whether the model is sharded, and the workers of this session hold the same shards."""
        return self._live.sharded

    @property
    def error(self) -> BaseException | None:
        """The error that broke a collective among all workers. Nothing can be synchronised after it until `regroup`."""
        return self._levels.world.broken

    @property
    def synced(self) -> bool:
        """Whether the last step synchronised among all workers. The same on all of them."""
        syncs = self.plan.syncs_at(self.step, self._clock)
        return self._clock.since == self.step or any(self.plan.is_outermost(sync) for sync in syncs)

    @property
    def progress(self) -> float:
        """How many steps the workers have taken, the same on all: for learning rates, and to end a run.

        It is `step`; where rounds end by the clock, the mean over the workers, up to the end of the last round.
        """
        return self.step if self._headers.rounds is None else self._headers.rounds.progress

    @property
    def in_flight(self) -> bool:
        """Whether a fragment was sent and has not taken effect yet."""
        return bool(self._weights.in_flight)

    @property
    def can_regroup(self) -> bool:
        """Whether `regroup` is possible: the model is neither DDP nor sharded."""
        return not self._path.in_backward

    # Options that may change between steps

    @property
    def commit(self) -> Commit:
        """How synchronised weights take effect: "streaming" or "atomic". See `attach`."""
        return self._weights.commit

    @commit.setter
    def commit(self, commit: Commit) -> None:
        check_choices(commit)
        self._weights.commit = commit

    @property
    def nonfinite(self) -> NonFinite:
        """What NaN or Inf on one worker leads to. See `attach`. Every worker sets it after the same step."""
        return self._averager.check.policy

    @nonfinite.setter
    def nonfinite(self, policy: NonFinite) -> None:
        check_policy(policy)
        self._averager.check.policy = policy

    @property
    def verify_every(self) -> int | None:
        """After how many synchronisations weights are compared. See `attach`. Every worker sets it at the same step."""
        return self._divergence.every

    @verify_every.setter
    def verify_every(self, every: int | None) -> None:
        self._divergence = DivergenceCheck(every)

    # What a training loop may call

    def weigh(self, n: int) -> None:
        """Count `n` samples or tokens of this worker: after `attach(..., weighted=True)`, means are weighted by them.

        Call it in each step before `backward`, on every worker, with `n=0` in a step without data. Gradients are
        weighted by what was counted in the step, weights and deltas by what was counted since they were last averaged.
        A worker's gradient must be the mean over the samples that it has counted. See docs/training.md.
        """
        if self._counts is None:
            raise RuntimeError(
                f"weigh({n!r}): this session does not weigh its workers, and all of them must agree to. Write "
                "attach(..., weighted=True) on every worker."
            )
        self._counts.add(n)

    def average_gradients(self, optimizer: Optimizer | None = None) -> None:
        """On a bare module: average the gradients now instead of at the optimizer's step.

        For code that needs them before the step, such as clipping by norm. With a GradScaler, `scaler.unscale_` comes
        first. Of several optimizers, those that have yet to step in this step are meant, or the one that is given.
        """
        found = [each for each in self._scaled if optimizer is None or each.optimizer is optimizer_inside(optimizer)]
        if not found:
            raise ValueError(
                f"average_gradients({type(optimizer).__name__}): attach was not given this optimizer. Give it one that "
                "attach was given, or none for all."
            )
        if self._void is not True:
            self._received(self._path.average_now([each for each in found if each in self._waiting]))

    def average_weights(self) -> None:
        """Average the weights of all workers now, exactly, where local steps have made them different.

        To save or evaluate one model. Every worker calls it after the same step. Fragments in flight take effect first.
        """
        self._check_between_rounds("average_weights()")
        self._average_weights(optimizers=False, force=False)

    def skip(self) -> None:
        """Count a step without calling the optimizer, for loops that skip an update on this worker only.

        The others may be about to synchronise, and this one must take part. Steps that a GradScaler skips are counted
        without it. It stands for all optimizers that have yet to step; others step these in the order of `attach`.
        Where means are weighted, a worker that has counted nothing in the step counts 0.
        """
        if self._counts is not None and self._counts.of_gradients() == NOT_COUNTED:
            self._counts.add(0)
        for each in list(self._waiting):
            self._before(each, step_follows=False)
            self._waiting.remove(each)
        self._after()

    def report(self, *, loss: float | Tensor, tokens: int = 0, validation: Validation | None = None) -> bool:
        """Pass the loss of a step to the observers, such as that of `laconic compare`; return whether to stop.

        Call it after each step, or each few, on every worker. `tokens` are how many this worker used. `validation` is a
        validation loss, or a function that computes it: `laconic compare` calls it, on the mean of all weights.
        """
        return sum(observer.report(self, loss, tokens, validation) for observer in self._observers) > 0  # each gets it

    def metrics(self) -> dict[str, float]:
        """Return this worker's metrics (docs/metrics.md). Sends nothing; may wait for a GPU, so not at every step."""
        return metrics_of(self)

    def stop_on(self, *signals: signal.Signals, every_s: float = 0.5) -> None:
        """Stop on these signals, by default SIGTERM. Every worker calls it, before the first step.

        When one worker gets one, `should_stop` becomes True on all after the same step (under `alone()` on this one):
        save, and leave the loop. DDP and sharded models then exchange a header every `every_s` seconds.
        """
        self._headers.stop.on(signals or (signal.SIGTERM,), every_s)
        self._prepare()

    @property
    def should_stop(self) -> bool:
        """Whether some worker got a signal to stop, and all workers know it. The same on all after each step."""
        return self._headers.stop.agreed

    def away(self, limit_s: float = 3600.0) -> AbstractContextManager[None]:
        """Return a context in which the others wait for this worker, such as to evaluate, for up to `limit_s`."""
        return self._levels.away(limit_s)

    def change(self, plan: Plan) -> None:
        """Go on with another plan from the next step. Every worker calls it after the same step.

        Weights that differ after local steps are averaged first; so are moments, if the new plan averages gradients.
        The new plan sends the old codec's residuals of gradients with the next 32 gradients; if it averages none, they
        are dropped. Each worker subtracts its residuals of weight deltas from its weights before these are averaged.
        """
        if not isinstance(plan, Plan):
            raise TypeError(f"change({plan!r}): a Plan is needed, such as laconic.power_sgd(rank=4).")
        # 1. check, on all workers
        given, plan = plan, plan.resolved(facts_of_model(self._live.model, self.optimizers, self.workers))
        self._path.check_plan(plan)
        check_rounds(plan, self._live.model, self._levels.shards is not None)
        self._check_between_rounds(f"change({plan!r})")
        step = round(self.progress)  # also where each worker has taken steps of its own
        agree(self._levels.world, "the plan to go on with", {"step": step, "plan": repr(plan)})
        self._levels.prepare(plan.levels)
        clock = SyncClock(since=max(step, plan.schedule.start - 1))
        gradients = any(s.payload is Payload.GRADIENT for s in plan.syncs_at(step + 1, clock))
        # 2. weights and moments that all workers share. Equal gradients move weights alike only if the optimizers'
        # moments are equal, too.
        self._weights.settle(self.plan, step=sys.maxsize)
        lagging = self.plan.needs_anchor and has_feedback(self.plan.codec)
        if lagging:
            if self._counts is not None:  # a residual has its worker's share in it already, and the weights have not
                self._average_weights(optimizers=False, force=True)
            self._weights.apply_residuals()
        self._average_weights(optimizers=gradients, force=lagging)
        if self._averager.scale is not None:  # scaled gradients are averaged
            self._averager.scale.equalise(self._levels.world)
        # 3. the new plan, with the state that it can use
        self.plan, self.given, self._clock = plan, given, clock
        self.step, self._headers.rounds = step, Rounds(progress=step) if isinstance(plan.schedule, Timed) else None
        self._live.reset(carry_residuals(self._live.state["gradient"]) if gradients else None)
        self._weights.forget()
        if self._counts is not None:
            self._counts.all_synced()
        self._restart()

    def detach(self) -> None:
        """Remove all hooks. A DDP model then averages gradients as DDP does."""
        while self._removals:
            self._removals.pop(0)()
        self._path.detach()
        self._weights.forget()
        self._levels.close()
        while self._observers:
            self._observers.pop(0).detached(self)

    def keep(self, name: str, thing: Stateful) -> None:
        """Make the state of `thing` a part of the session's, under this name: each worker saves and loads its own.

        If a state of this name was loaded before, `thing` gets it now.
        """
        if name in self._kept:
            raise ValueError(
                f"keep({name!r}, ...): the session keeps another object of this name. Choose another name."
            )
        if not all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict")):
            raise TypeError(
                f"keep({name!r}, {type(thing).__name__}): it needs the methods state_dict() and "
                "load_state_dict(state), as a scheduler has them. Give an object that has both."
            )
        if name in self._unclaimed:
            thing.load_state_dict(self._unclaimed[name])
            del self._unclaimed[name]
        self._kept[name] = thing

    def state_dict(self) -> dict[str, Any]:
        """Return what this worker must save besides model and optimizer. Each worker saves its own."""
        weights = self._weights.state_dict()  # first: fragments in flight still change residuals
        kept = self._unclaimed | {name: each.state_dict() for name, each in self._kept.items()}
        return {
            "plan": repr(self.plan),
            "step": self.step,
            "since": self._clock.since,
            "lr": self._clock.lr,
            "layout": self._path.layout(),
            **self._live.state_dict(),
            **weights,
            **({} if self.given is self.plan else {"given": repr(self.given)}),
            **({} if self._counts is None else {"counted": self._counts.state_dict()}),
            **({} if self._headers.rounds is None else {"rounds": self._headers.rounds.state_dict()}),
            **({"kept": kept} if kept else {}),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. The plan must be the one that was saved.

        A target of bytes that was saved goes on as the plan that it was, also where it would now become another, among
        another number of workers. Where this state, or an object that the session keeps its own, is refused, all stay
        as they were.
        """
        same_target = self.given is not self.plan and saved.get("given") == repr(self.given)
        plan = parse_plan(saved["plan"]) if same_target else self.plan
        if saved["plan"] != repr(plan):
            raise ValueError(
                f"this state was saved under {saved['plan']} and the plan is {plan!r}: the state of one codec is "
                f"of no use to another. Attach laconic.plan({saved['plan']!r}), load, then change(...) to the new plan."
            )
        if "counted" in saved and self._counts is None:
            raise ValueError(
                "this state is of a run whose workers weigh by what they count, and this session does not weigh them: "
                "the run would go on with other means. Attach with weighted=True, and call session.weigh(n)."
            )
        kept = saved.get("kept", {})
        if missing := self._kept.keys() - kept.keys():
            raise ValueError(
                f"load_state_dict: this state was saved without {', '.join(map(repr, sorted(missing)))}, which the "
                "session keeps. Load it first, and call session.keep (or make the sampler) afterwards: it then starts "
                "from its own state."
            )
        self._load_kept(saved["step"], kept)  # which may be refused, so it comes first
        self.plan = plan
        if self._counts is not None:  # of a run that had plain means there is nothing: it goes on with weighted ones
            self._counts.load_state_dict(saved.get("counted", Counts().state_dict()))
        self._clock = SyncClock(saved["since"], saved["lr"])
        if self._headers.rounds is not None:
            self._headers.rounds.load_state_dict(saved["rounds"])
        self._live.load_state_dict(saved)
        self._path.repeat_layout(saved["layout"])
        self._weights.load_state_dict(saved)
        self._unclaimed = {name: state for name, state in kept.items() if name not in self._kept}
        self._headers.stop.restart()
        self._restart()

    def _load_kept(self, step: int, states: Mapping[str, Any]) -> None:
        """Go to a step, from which samplers count, and load what is kept. If one refuses its state, undo all of it.

        Nothing comes after the last one, so it needs no copy: it is as it was if it refuses.
        """
        was, things = self.step, list(self._kept.items())
        before = [(each, copy.deepcopy(each.state_dict())) for _, each in things[:-1]]
        try:
            self.step = step
            for name, each in things:
                each.load_state_dict(states[name])
        except BaseException:
            self.step = was
            for each, state in before:
                each.load_state_dict(state)
            raise

    # What observers and tools may call

    def observe(self, observer: StepObserver) -> None:
        """Add an observer."""
        self._observers.append(observer)
        observer.attached(self)

    def wrap_codec(self, wrap: Callable[[Codec], Codec]) -> None:
        """Let `wrap` put a codec of its own around each codec that runs among all workers, from the next step on.

        To watch exchanges, as `laconic.Guard` does, or to take their place. Every worker calls it after the same step.
        """
        self._averager.wraps.append(wrap)
        self._prepare()

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather a row of numbers from every worker, in their order. Every worker calls it with as many numbers."""
        return list(self._levels.world.gather(torch.tensor(numbers, dtype=torch.int64)).tolist())

    def regroup(self, group: dist.ProcessGroup) -> None:
        """Go on with the workers of another group, after some were lost or new ones came. For bare modules.

        All workers of the new group call it after the same step. Collectives in flight in the old group are left
        behind; this worker's residuals, its anchor and its step stay as they are.
        """
        if self._path.in_backward:
            raise RuntimeError(
                "regroup: a DDP or sharded model cannot leave its process group. Attach to a bare module, which "
                "averages gradients at the optimizer's step."
            )
        self._levels.abandon()
        levels = self._levels.regrouped(self.plan.levels, group)
        self._levels = self._averager.levels = levels
        self._averager.check.forget()  # of a step that failed half-way
        self._weights.in_flight = []
        self._divergence = DivergenceCheck(self._divergence.every)  # it counts: from now on the same on all workers
        self._restart()

    def abandon(self) -> None:
        """Leave the group, with the collectives that are in flight. `regroup` goes on in another."""
        self._levels.abandon()

    def cancel_wait(self) -> None:
        """End the wait for a collective that is in progress, with a `LostWorkerError`. Safe in any thread."""
        self._levels.cancel_wait()

    # The hooks of the optimizers

    def _install(self) -> None:
        """Install the hooks: `attach` calls it once, after everything that may refuse."""
        try:
            self._path.install()
            for each in self._scaled:
                if not each.native:
                    always_call(each.optimizer)
                    self._removals.append(partial(call_as_before, each.optimizer))
                self._removals += [
                    each.optimizer.register_step_pre_hook(partial(self._before_step, each)).remove,
                    each.optimizer.register_step_post_hook(partial(self._after_step, each)).remove,
                ]
            self._removals.append(OtherOptimizers(self._live).install().remove)
            self._prepare()
        except BaseException:
            self.detach()
            raise

    def _before_step(self, scaled: ScaledSteps, optimizer: Optimizer, args: Any, kwargs: Any) -> Arguments | None:
        if scaled.may_nest and is_nested_step(optimizer):  # it counts once
            return None
        if len(args) > 1 or kwargs:  # perhaps a closure: gradients are ready at its end
            return run_when_ready(args, kwargs, partial(self._ready, scaled))
        self._ready(scaled, 1)
        return None

    def _ready(self, scaled: ScaledSteps, evaluations: int) -> None:
        """The gradients of a step are there, of this evaluation of its closure."""
        if evaluations == 1:
            self._before(scaled, step_follows=True)
            scaled.begin_step()
            return
        if self._gradient is not None and self._levels[self._gradient.level].workers > 1:
            raise RuntimeError(
                f"{type(scaled.optimizer).__name__} calls its closure more than once in a step, and {self.plan!r} "
                "averages gradients once. Each worker sees its own loss, and would search for itself. Use an optimizer "
                "that calls it once, or a plan that averages weights, such as diloco()."
            )
        self._clipping.clip(scaled)

    def _after_step(self, scaled: ScaledSteps, optimizer: Optimizer, *_: object) -> None:
        if scaled.may_nest and is_nested_step(optimizer):
            return
        scaled.end_step()
        self._waiting.remove(scaled)
        if not self._waiting:
            if self._headers.rounds is not None:
                self._headers.rounds.taken += 1
            self._after()

    # One step

    def _prepare(self) -> None:
        """Prepare the next step: what is synchronised in it, and whether gradients are averaged."""
        number = self.ledger.step = self.step + 1
        self._waiting, self._void = list(self._scaled), False
        self._syncs = self.plan.syncs_at(number, self._clock)
        self._gradient = None
        for sync in self._syncs:
            if sync.payload is Payload.GRADIENT:
                self._gradient = sync
                break
        gradient = self._gradient
        self._headers.begin_step(self.plan, number, gradient is not None and gradient.level is None)
        self._averager.begin_step(gradient, None if gradient is None else self.plan.codec_of(gradient, number))
        self._path.begin_step(gradient)

    def _restart(self) -> None:
        """Prepare the next step after something else than a step: observers learn it first."""
        if self._headers.rounds is not None:
            self._headers.rounds.restart_clock()
        for observer in self._observers:
            observer.restarted(self)
        self._prepare()

    def _before(self, scaled: ScaledSteps, step_follows: bool) -> None:
        """Average and check gradients with the other workers, also where this worker then takes no step."""
        begins = len(self._waiting) == len(self._scaled)
        # 1. whether there is anything that must not go on
        if begins:
            for observer in self._observers:
                observer.before_step(self)
        self._levels.raise_if_broken()
        self._live.refresh_held()
        if self._first:
            check_first_step(None if self._path.in_backward else self._live.model, self._levels)
            if self.step == 0:
                warn_of_lost_state(self.plan, self.optimizers, self._levels.world)
            self._first = False
        if scaled not in self._waiting:
            others = ", ".join(type(each.optimizer).__name__ for each in self._waiting)
            raise RuntimeError(
                f"{type(scaled.optimizer).__name__} steps twice, and {others} has not stepped yet: a step is over when "
                "each optimizer that attach was given has stepped once. For parts of a model that step at different "
                "rates, attach a session to each: attach(plan, model.part, optimizer)."
            )
        # 2. the beginning of a round: where deltas start from, and the learning rate that its length may follow
        first = self._clock.since == self.step
        if self.plan.needs_anchor and self.step + 1 >= self.plan.schedule.start:
            self._weights.begin_step(first)
        if first or isinstance(self.plan.schedule, Quadratic):
            self._read_lr(first)
        # 3. gradients
        if self._void is True:  # no worker averages any more in this step: nobody would use the means
            self._averager.check.forget()
        else:
            self._received(self._path.before_optimizer(scaled))
            if self._gradient is not None:
                self._check_finite(self._gradient, scaled, begins)
        # 4. what the optimizer then does with them
        if not step_follows:
            return
        if self._void is True:
            scaled.skip_step()
            return
        self._clipping.clip(scaled)
        if isinstance(self._void, Tensor):
            scaled.skip_step_if(self._void)

    def _after(self) -> None:
        """Count a step, and synchronise weights where the plan says so."""
        self.step += 1
        # 1. fragments that are due take effect
        if self._weights.in_flight:
            self._compare_weights(self._weights.settle(self.plan, self.step))
        # 2. weights, innermost groups first
        if self._headers.rounds is not None:  # only now is it known how long the step took
            clock = replace(self._clock, elapsed_s=self._headers.rounds.elapsed_s)
            self._syncs = self.plan.syncs_at(self.step, clock)
        for sync in self._syncs:
            if sync.payload is Payload.WEIGHTS:
                shared = self._weights.sync(self.plan, sync, self._headers)
                if self.plan.is_outermost(sync):
                    self._compare_weights(shared)
                    if sync.fragment is None:
                        self._clock = SyncClock(self.step)
        # 3. where all workers have averaged gradients: buffers of a DDP model
        if self._gradient is not None and self._gradient.level is None:
            self._path.after_optimizer()
            self._compare_weights(self._live.params, every_step=True)
        if self._gradient is not None and self._counts is not None:
            self._counts.synced(self.plan, self._gradient)
        # 4. the next step
        if self._headers.rounds is not None and self.synced:
            if self._gradient is not None:
                self._headers.rounds.progress = self.step
            self._headers.rounds.taken = 0
            self._headers.rounds.restart_clock()
        self._prepare()
        for observer in self._observers:
            observer.after_step(self)

    def _read_lr(self, first: bool) -> None:
        """Note the learning rate of the round: that of its first step, or a larger one where the period follows it."""
        lr = float(self._scaled[0].optimizer.param_groups[0].get("lr", inf))
        if first or (self.step > self._clock.since and lr > self._clock.lr):
            self._clock = SyncClock(self._clock.since, lr)
            self._syncs = self.plan.syncs_at(self.step + 1, self._clock)

    def _received(self, headers: Headers | None) -> None:
        if headers is None:
            return
        assert self._gradient is not None
        self._headers.received(headers, among_all=self._levels[self._gradient.level] is self._levels.world)
        if self._headers.stop_due and self._path.in_backward:
            self._headers.stop.exchanged(self._headers.step, headers.slowest_ms)
            self._headers.stop_due = False  # once in a step, whatever the number of optimizers

    def _check_finite(self, sync: Sync, scaled: ScaledSteps, begins: bool) -> None:
        """Find out whether the gradients that were averaged since the last optimizer's step are finite."""
        check, queue = self._averager.check, self._levels[sync.level]
        if begins:
            check.report_late(self._live.originals)
        if scaled.scaled:
            if self._path.in_backward and self._averager.lacks_scale:
                raise RuntimeError(
                    f"{self.plan!r} under a GradScaler: gradients are averaged in backward, times the loss scale, and "
                    "residuals of one step do not fit the scale of another. Let the session read it: attach(..., "
                    "scaler=scaler). Or attach to the bare module, which averages unscaled gradients."
                )
            check.forget()  # the GradScaler decides
        elif check.late:
            flag = check.nonfinite_flag(queue, self._live.gradients, self._headers.step)
            if flag is not None:
                self._void = flag if self._void is False else torch.maximum(flag, torch.as_tensor(self._void))
        else:
            self._void = check.has_nonfinite(queue, self._live.gradients, self._headers.step)

    def _compare_weights(self, shared: Mapping[str, Tensor], every_step: bool = False) -> None:
        """Compare what all workers must hold alike, if a comparison is due."""
        every_step, levels = every_step or self.plan.schedule.period == 1, self._levels
        self._divergence.after_sync(levels.world, shared, every_step, round(self.progress), levels.shards)

    def _average_weights(self, optimizers: bool, force: bool) -> None:
        """Average weights where local steps have made them different, or `force` says so; and the optimizers' state."""
        self._weights.settle(self.plan, step=sys.maxsize)
        different = optimizers or force or self._clock.since != self.step
        if self.plan.local and self.step >= self.plan.schedule.start and different:
            self._weights.average_all(self.plan, self._headers, optimizers)

    def _check_between_rounds(self, call: str) -> None:
        if self._headers.rounds is not None and not self.synced:
            raise RuntimeError(
                f"{call} in the middle of a round of {self.plan!r}: each worker is at a step of its own, and the "
                "others may be synchronising. Call it on all workers at the end of a round: if session.synced. The "
                "weights are their mean then."
            )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        return f"<Session {self.plan!r} at step {self.step}, {self.workers} workers>"
