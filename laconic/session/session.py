"""Puts a plan on a model and an optimizer. The only file, with `dispatch.py` and `sharded.py`, that installs hooks.

    session = laconic.attach(laconic.power_sgd(rank=4), model, optimizer)

The training loop does not change. On a DDP model, gradients travel through DDP's communication hook, overlapped
with backward; on one that FSDP shards, through its hooks (`sharded.py`); on a bare module, at the optimizer's step.
Weights are averaged right after the optimizer's step. In steps of silence nothing travels at all, DDP's own broadcasts
included.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from laconic.checks.agreement import agree
from laconic.checks.finite import Divergence, HeaderBeside, Headers, NonFinite, exchange_headers, gathered
from laconic.codecs import Codec
from laconic.comm.groups import Given, Levels
from laconic.comm.queue import CollectiveQueue, resolved
from laconic.ledger import Ledger
from laconic.plans.plan import Plan
from laconic.plans.schedules import Payload, Sync, SyncClock
from laconic.session.attach import check_arguments, group_of, handshake_facts, sync_initial_weights
from laconic.session.ddp import Dispatcher, dispatcher_of, find_ddp
from laconic.session.fsdp import Sharded, check_sharded, check_sharded_plan, replicas_of
from laconic.session.fsdp_units import find_units
from laconic.session.grad_scaler import LossScaling, skips_by_itself
from laconic.session.model_state import ModelState, fresh_state
from laconic.session.observers import StepObserver, observers_from_env
from laconic.session.weights import Anchors, Commit, WeightSync

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


class _Handle(Protocol):
    def remove(self) -> None: ...


def attach(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    group: dist.ProcessGroup | None = None,
    levels: Given | None = None,
    ledger: Ledger | None = None,
    commit: Commit = "streaming",
    anchors: Anchors = "device",
    timeout_s: float | None = None,
    sync_initial: bool | None = None,
    nonfinite: NonFinite | None = None,
    verify_every: int | None = None,
) -> Session:
    """Let the workers that hold copies of `model` agree as `plan` says.

    Every worker calls it with the same plan. `model` is a DDP model, one sharded by FSDP2, or a bare module, compiled
    or not; `optimizer` is one, or several that step one after the other: a step is over when the last has stepped.
    `group` are the workers that agree, by default DDP's group or the world; of a sharded model, those that hold the
    same shards. Without torch.distributed it is a world of one, where nothing is sent.

    `levels` are the groups inside it that the plan may name, from a DeviceMesh (innermost dimension last) or as this
    worker's process groups, innermost first; by default a group of n is n consecutive workers. A round of weights
    commits bucket by bucket ("streaming"), or all at once at its end ("atomic": one copy of the weights more, and a
    round that fails has changed nothing). `anchors="cpu"` keeps the weights that deltas start from in host memory.
    `timeout_s` is how long to wait for other workers in one collective; by default ten times the longest so far, and
    at least 30 s. Whoever is then missing is named in a `LostWorkerError`.

    Workers that do not agree about model, plan and versions get a `DisagreementError`, all of them. Weights that differ
    at the start are reported; with `sync_initial=True` all take the first worker's without a word, as those of a bare
    module do in any case, and with False it is an error. `nonfinite` says what NaN or Inf on one worker leads to:
    "skip" (nobody steps; in a round of weights, it adopts the others' mean), "exclude" (average without it), "raise" or
    "ignore". The default is "skip"; on a GPU only with fused optimizers, which skip by themselves, and the culprit is
    named a step later. With others, and for sharded models, it would have to be waited for in each step: "ignore".
    Every `verify_every` rounds (a step that averages gradients is one) the workers' weights are compared bit for bit;
    by default every round of weights and every 100 steps of gradients, with 0 never.
    """
    options = Options(commit, anchors, timeout_s, sync_initial, nonfinite, verify_every)
    return Session(plan, model, optimizer, group, levels, ledger, options)


@dataclass(frozen=True)
class Options:
    """How a talk is kept, whatever its plan. See `attach`."""

    commit: Commit = "streaming"
    anchors: Anchors = "device"
    timeout_s: float | None = None
    sync_initial: bool | None = None
    nonfinite: NonFinite | None = None
    verify_every: int | None = None

    def nonfinite_in(self, model: nn.Module, can_be_late: bool) -> NonFinite:
        """Tell what NaN leads to in this model: on a GPU, to know of it may mean to wait for it in every step."""
        return self.nonfinite or ("skip" if can_be_late or _on_cpu(model) else "ignore")


def _on_cpu(model: nn.Module) -> bool:
    return all(p.device.type == "cpu" for p in model.parameters())


class Session:
    """A plan at work. A context manager: leaving it detaches."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        group: dist.ProcessGroup | None = None,
        levels: Given | None = None,
        ledger: Ledger | None = None,
        options: Options | None = None,
    ) -> None:
        options = Options() if options is None else options
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._units = find_units(model)
        check_arguments(plan, model, optimizers)
        self.plan = plan
        self.step = 0
        """Optimizer steps since `attach`."""
        self._observers = observers_from_env()
        self.ledger = Ledger() if ledger is None else ledger
        ddp = find_ddp(model)
        whole = group_of(ddp, group or replicas_of(self._units), levels)
        check_sharded(model, self._units, plan, whole)
        self._timeout_s = options.timeout_s
        self._levels = Levels(plan.levels, whole, self.ledger, levels, options.timeout_s)
        can_be_late = not self._units and not _on_cpu(model) and all(map(skips_by_itself, optimizers))
        policy = options.nonfinite_in(model, can_be_late)
        self._divergence = Divergence(options.verify_every)
        self._model_state = ModelState(
            ddp.module if ddp else model, self._levels, policy, late=can_be_late and policy == "skip"
        )
        self._weight_sync = WeightSync(self._model_state, optimizers, options.commit, options.anchors, policy)
        agree(self._levels.world, "what is attached", handshake_facts(plan, self._model_state, model, options.commit))
        self._levels.prepare(plan.levels)
        self._clock = SyncClock(since=plan.schedule.start - 1)
        self._gradient: Sync | None = None
        self._gradients_ready = False
        self._beside: HeaderBeside | None = None
        self._dispatcher: Dispatcher | Sharded | None = None
        if self._units:  # before any hook: it may refuse
            self._dispatcher = Sharded(self._units, self._model_state, self._gradient_codec)
        self._scalings = [LossScaling(each) for each in optimizers]
        self._first_group = optimizers[0].param_groups[0]
        self._handles: list[_Handle] = [
            optimizers[0].register_step_pre_hook(self._before_step),
            *(scaling.attach() for scaling in self._scalings),
            optimizers[-1].register_step_post_hook(self._after_step),
        ]
        if self._dispatcher is not None:
            self._handles.append(self._dispatcher)
        sync_initial_weights(self._model_state, options.sync_initial, ddp is None)
        if ddp is not None:
            self._dispatcher = dispatcher_of(ddp)
            self._dispatcher.take = self._average_bucket
        self._prepare()
        for observer in self._observers:
            observer.attached(self)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of all workers that the session uses; None for a world of one."""
        return self._levels.world.group

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The trained parameters by name, as the model and the optimizers know them."""
        return self._model_state.originals

    @property
    def error(self) -> BaseException | None:
        """The error that broke a collective of the group; nothing more can be synchronised until `regroup`."""
        return self._levels.world.broken

    @property
    def in_flight(self) -> bool:
        """Whether a fragment was sent and has not taken effect yet."""
        return self._weight_sync.waiting

    @property
    def synced(self) -> bool:
        """Whether the last step synchronised among all workers. The same on all of them."""
        syncs = self.plan.syncs_at(self.step, self._clock)
        return self._clock.since == self.step or any(self.plan.is_outermost(sync) for sync in syncs)

    @property
    def commit(self) -> Commit:
        """How a synchronisation of weights takes effect: "streaming" or "atomic". See `attach`."""
        return self._weight_sync.commit

    @commit.setter
    def commit(self, commit: Commit) -> None:
        self._weight_sync.commit = commit

    @property
    def can_regroup(self) -> bool:
        """Whether `regroup` is possible: the model is neither DDP nor sharded."""
        return self._dispatcher is None

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather a row of numbers from every worker, in their order. Every worker calls it, with as many numbers."""
        rows: list[list[int]] = gathered(self._levels.world, torch.tensor(list(numbers), dtype=torch.int64)).tolist()
        return rows

    def abandon(self) -> None:
        """Leave the group, with the collectives that are in flight. `regroup` goes on in another."""
        self._levels.abandon()

    def cancel_wait(self) -> None:
        """End the wait for a collective that is in progress, with a `LostWorkerError`. Safe in any thread."""
        if self._levels.world.timeout is not None:
            self._levels.world.timeout.cancel()

    def observe(self, observer: StepObserver) -> None:
        """Add an observer."""
        self._observers.append(observer)
        observer.attached(self)

    @property
    def workers(self) -> int:
        """How many workers agree."""
        return self._model_state.queue.workers

    def average_gradients(self) -> None:
        """On a bare module: average the gradients now instead of at the optimizer's step.

        For what must see the averaged gradients before the step, such as clipping by norm.
        """
        sync = self._gradient
        if self._dispatcher is None and sync is not None and not self._gradients_ready:
            for scaling in self._scalings:
                scaling.unscale()
            self._model_state.average_gradients(self.plan.codec_of(sync, self.step + 1), sync.level, self._open)
            for scaling in self._scalings:
                scaling.agree()
            self._gradients_ready = True

    def skip(self) -> None:
        """Count a step without calling the optimizer, for loops that skip an update on this worker only.

        The other workers may be about to average weights, and this one must be there. Steps that a GradScaler
        skips are seen without this call.
        """
        self._meet(step_follows=False)
        self._finish_step()

    def report(self, *, loss: float | Tensor, tokens: int = 0) -> bool:
        """Tell `laconic compare`, if it runs this training, the loss of a step; returns whether it has seen enough.

        Call it after each step, or each few, on every worker. `tokens` are what the step learned from on this worker.
        Run by anything else, it does nothing and is False.
        """
        return any([observer.report(self, loss, tokens) for observer in self._observers])

    def stop_on(self, *signals: signal.Signals) -> None:
        """Take these signals, SIGTERM by default, as the wish to stop. Every worker calls it, before the first step.

        When one worker is told, `should_stop` becomes True on all after the same step: save, and leave the loop.
        DDP and sharded models that average gradients then exchange about 40 bytes more twice a second.
        """
        self._weight_sync.stop.on(*(signals or (signal.SIGTERM,)))

    @property
    def should_stop(self) -> bool:
        """Whether somebody was told to stop, and all workers know it. The same on all after each step."""
        return self._weight_sync.stop.agreed

    def change(self, plan: Plan) -> None:
        """Go on with another plan from the next step. Every worker calls it after the same step.

        Weights that local steps have driven apart are averaged first; what the old codec owed is dropped.
        """
        if not isinstance(plan, Plan):
            raise TypeError(f"change({plan!r}): a Plan is needed, such as laconic.power_sgd(rank=4).")
        check_sharded_plan(self._units, plan)
        agree(self._levels.world, "the plan to go on with", {"step": self.step, "plan": repr(plan)})
        self._levels.prepare(plan.levels)
        self.average_weights()
        self.plan = plan
        self._clock = SyncClock(since=max(self.step, plan.schedule.start - 1))
        self._model_state.state = fresh_state()
        self._weight_sync.forget()
        self._prepare()

    def average_weights(self) -> None:
        """Bring the weights of all workers together now, exactly, where local steps have driven them apart.

        For what must see one model, such as saving or evaluating it between two rounds. Every worker calls it after the
        same step. What is on its way takes effect first.
        """
        self._weight_sync.settle(self.plan, step=sys.maxsize)
        if self.plan.local and self.step >= self.plan.schedule.start and self._clock.since != self.step:
            self._weight_sync.average_all()

    def regroup(self, group: dist.ProcessGroup) -> None:
        """Go on with the workers of another group, after some were lost or new ones came. For bare modules.

        All workers of the new group call it after the same step. What was under way in the old group is left behind;
        what this worker's codecs owe, its anchor and its step stay as they are.
        """
        if self._dispatcher is not None:
            raise RuntimeError(
                "regroup: a DDP or sharded model cannot leave its process group. Attach to a bare module, which "
                "averages gradients at the optimizer's step."
            )
        self._levels.abandon()
        self._levels = Levels(self.plan.levels, group, self.ledger, timeout_s=self._timeout_s)
        self._levels.prepare(self.plan.levels)
        self._model_state.regroup(self._levels)
        self._weight_sync.forget_the_way()
        self._divergence = Divergence(self._divergence.every)  # it counts rounds: from now on, those of all alike
        self._prepare()

    def detach(self) -> None:
        """Take all hooks off. A DDP model then averages gradients as DDP does."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if isinstance(self._dispatcher, Dispatcher) and self._dispatcher.take == self._average_bucket:
            self._dispatcher.take = None
            self._dispatcher.let_talk(True, True)
        self._weight_sync.forget()
        self._levels.close()
        observers, self._observers = self._observers, []
        for observer in observers:
            observer.detached(self)

    def state_dict(self) -> dict[str, Any]:
        """What this worker must save besides model and optimizer. Each worker saves its own."""
        return {
            "plan": repr(self.plan),
            "step": self.step,
            "since": self._clock.since,
            "lr": self._clock.lr,
            **self._model_state.state_dict(),
            **self._weight_sync.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. The plan must be the one that was saved."""
        if saved["plan"] != repr(self.plan):
            raise ValueError(
                f"this state was saved under {saved['plan']} and the plan is {self.plan!r}: what one codec owes means "
                f"nothing to another. Attach laconic.plan({saved['plan']!r}), load, then change(...) to the new plan."
            )
        self.step = saved["step"]
        self._clock = SyncClock(saved["since"], saved["lr"])
        self._model_state.load_state_dict(saved)
        self._weight_sync.load_state_dict(saved)
        self._weight_sync.stop.begin_anew()
        self._prepare()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def __repr__(self) -> str:
        return f"<Session {self.plan!r} at step {self.step}, {self.workers} workers>"

    def _prepare(self) -> None:
        """Get ready for the next step: whether gradients are averaged in it, and where deltas start from."""
        syncs = self.plan.syncs_at(self.step + 1, self._clock)
        self.ledger.step = self.step + 1
        self._gradients_ready = False
        self._gradient = next((sync for sync in syncs if sync.payload is Payload.GRADIENT), None)
        if self._dispatcher is not None:
            among_all = self._gradient is not None and self._gradient.level is None
            self._dispatcher.let_talk(self._gradient is not None, among_all)
        if self._weight_sync.anchor is None and self.plan.needs_anchor and self.step + 1 >= self.plan.schedule.start:
            self._weight_sync.drop_anchor()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None
        if closure and self._gradient is not None and self._dispatcher is None:
            raise RuntimeError(
                "optimizer.step(closure) computes gradients inside the step, where a bare module cannot average them. "
                "Wrap the model in DistributedDataParallel, or call backward before optimizer.step()."
            )
        self._meet(step_follows=True)

    def _meet(self, step_follows: bool) -> None:
        """Do with the other workers what comes before a step, also where this one then takes none."""
        for observer in self._observers:
            observer.before_step(self)
        self._levels.raise_if_broken()
        if self._beside is not None:
            beside, self._beside = self._beside, None
            self._hear(beside.heard())
        elif self._tells and isinstance(self._dispatcher, Sharded):
            self._hear(exchange_headers(self._model_state.queue, *self._said_of_stopping()))
        if self._clock.since == self.step:  # the first step of a round: its learning rate sets the clock
            self._clock = SyncClock(self.step, float(self._first_group["lr"]))
        if self._gradient is not None:
            if self._dispatcher is None:
                self.average_gradients()
            self._leave_out_if_spoiled(step_follows)

    def _open(self, queue: CollectiveQueue, rest: Sequence[int]) -> Tensor:
        """Exchange headers before gradients are averaged or used; returns what else the workers said."""
        heard = exchange_headers(queue, *self._said(rest))
        self._weight_sync.stop.heard(heard.stop, queue is self._model_state.queue)
        return heard.rest

    @property
    def _tells(self) -> bool:
        """Whether all workers are to hear in this step, in which they average gradients, who was asked to stop."""
        among_all = self._gradient is not None and self._gradient.level is None
        return among_all and self._weight_sync.stop.is_due(self.step + 1)

    def _said(self, rest: Sequence[int]) -> tuple[int, str, bool, bool, Sequence[int]]:
        return self.step + 1, self.plan.text, True, self._weight_sync.stop.asked, rest

    def _said_of_stopping(self) -> tuple[int, str, bool, bool, Sequence[int]]:
        return self._said([*self._model_state.no_words[:-1], self._weight_sync.stop.pace_ms(self.step + 1)])

    def _hear(self, heard: Headers) -> None:
        self._weight_sync.stop.heard(heard.stop, among_all=True)
        self._weight_sync.stop.has_asked(self.step + 1, int(heard.rest[:, -1].max()))

    def _leave_out_if_spoiled(self, step_follows: bool) -> None:
        assert self._gradient is not None
        guard, scalings = self._model_state.guard, self._scalings if step_follows else []
        guard.tell(self._model_state.originals)
        if any(scaling.scaled for scaling in self._scalings):
            guard.forget()  # the GradScaler decides
            return
        if guard.late:
            verdict = self._model_state.verdict(self._gradient.level, self.step + 1)
            for scaling in scalings:
                scaling.leave_out_if(verdict)
            return
        averaged, self._gradients_ready = self._gradients_ready, False  # whoever catches the error begins anew
        if self._model_state.spoiled(self._gradient.level, self.step + 1):
            for scaling in scalings:
                scaling.leave_out()
        self._gradients_ready = averaged

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._finish_step()

    def _finish_step(self) -> None:
        self.step += 1
        if self._weight_sync.waiting:
            self._weight_sync.settle(self.plan, self.step)
        for sync in self.plan.syncs_at(self.step, self._clock):
            if sync.payload is Payload.WEIGHTS:
                self._weight_sync.sync(self.plan, sync, self.step)
                if sync.part is None and self.plan.is_outermost(sync):
                    self._clock = SyncClock(self.step)
                    self._verify(local=True)
        if self._gradient is not None and self._gradient.level is None:
            self._verify(local=False)
        self._prepare()
        for observer in self._observers:
            observer.after_step(self)

    def _verify(self, local: bool) -> None:
        self._divergence.after_round(self._model_state.queue, self._model_state.params, local, self.step)

    def _gradient_codec(self) -> Codec | None:
        return None if self._gradient is None else self.plan.codec_of(self._gradient, self.step + 1)

    def _average_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        sync, codec = self._gradient, self._gradient_codec()
        if sync is None or codec is None:
            return resolved(bucket.buffer())
        if self._tells and self._beside is None:
            self._beside = HeaderBeside(self._model_state.queue, *self._said_of_stopping())
        return self._model_state.average_bucket(codec, sync.level, bucket)
