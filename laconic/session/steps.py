"""What happens before and after each step of the optimizers.

Steps count from 1. Before a step, its gradients are averaged and checked; after it, weights are synchronised where the
plan says so, and the next step is prepared. A step in which nothing is synchronised sends nothing. Several optimizers
step in any order: a step is over when each has stepped once.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.checks.agreement import agree
from laconic.checks.divergence import DivergenceCheck
from laconic.checks.headers import Headers
from laconic.codecs.feedback import has_feedback
from laconic.comm.groups import Levels
from laconic.ledger import Ledger
from laconic.plans.plan import Plan
from laconic.plans.schedules import Payload, Quadratic, Sync, SyncClock
from laconic.session.carry_over import apply_residuals
from laconic.session.clipping import Clipping
from laconic.session.grad_scaler import ScaledSteps
from laconic.session.gradients import GradientAverager, GradientPath
from laconic.session.held import HeldParameters
from laconic.session.stop import StepHeaders
from laconic.session.unwrap import optimizer_inside
from laconic.session.weights import WeightSync


class Steps:
    """Runs the plan, step by step."""

    def __init__(
        self,
        plan: Plan,
        path: GradientPath,
        averager: GradientAverager,
        weights: WeightSync,
        divergence: DivergenceCheck,
        headers: StepHeaders,
        scaled: Sequence[ScaledSteps],
        held: HeldParameters,
        ledger: Ledger,
        clipping: Clipping,
    ) -> None:
        self.plan = plan
        self.step = 0
        self.clock = SyncClock(since=plan.schedule.start - 1)
        self.levels = averager.levels
        self.path = path
        self.weights = weights
        self.divergence = divergence
        self.headers = headers
        self._averager, self._model_state = averager, averager.model_state
        self.scaled, self._held = scaled, held
        self._ledger = ledger
        self._clipping = clipping
        self._gradient: Sync | None = None
        self.at_first_step: Callable[[Levels], None] | None = None
        """What is checked when the first step begins."""
        self._stepped: list[ScaledSteps] = []
        """The optimizers that have stepped in this step."""
        self._void: Tensor | bool = False
        """Whether gradients of this step were not finite, so that no optimizer may step any more; late, as 1.0."""

    @property
    def synced(self) -> bool:
        """Whether the last step synchronised among all workers. The same on all of them."""
        syncs = self.plan.syncs_at(self.step, self.clock)
        return self.clock.since == self.step or any(self.plan.is_outermost(sync) for sync in syncs)

    def prepare(self) -> None:
        """Prepare the next step: whether gradients are averaged in it."""
        self._stepped, self._void = [], False
        number = self.step + 1
        self._ledger.step = number
        syncs = self.plan.syncs_at(number, self.clock)
        gradient = next((sync for sync in syncs if sync.payload is Payload.GRADIENT), None)
        self._gradient = gradient
        self.headers.begin_step(self.plan, number, gradient is not None and gradient.level is None)
        self.path.begin_step(gradient, None if gradient is None else self.plan.codec_of(gradient, number))

    def stop_on(self, signals: Sequence[signal.Signals], every_s: float) -> None:
        """Stop together on these signals, from the next step on."""
        self.headers.stop.on(signals, every_s)
        self.prepare()

    @property
    def begins(self) -> bool:
        """Whether no optimizer has stepped in this step yet."""
        return not self._stepped

    @property
    def waiting(self) -> list[ScaledSteps]:
        """The optimizers that have yet to step in this step."""
        return [each for each in self.scaled if each not in self._stepped]

    def average_gradients(self, optimizer: object) -> None:
        """Average the gradients of a bare module now: those of one optimizer, or of all that have yet to step."""
        found = [each for each in self.scaled if optimizer is None or each.optimizer is optimizer_inside(optimizer)]
        if not found:
            raise ValueError(
                f"average_gradients({type(optimizer).__name__}): attach was not given this optimizer. Give it one that "
                "attach was given, or none for all."
            )
        if self._void is not True:
            self._received(self.path.average_now([each for each in found if each not in self._stepped]))

    def evaluated_again(self, optimizer: ScaledSteps) -> None:
        """Take gradients that a closure has computed again in the same step, as LBFGS does."""
        if self._gradient is not None and self.levels[self._gradient.level].workers > 1:
            raise RuntimeError(
                f"{type(optimizer.optimizer).__name__} calls its closure more than once in a step, and {self.plan!r} "
                "averages gradients once. Each worker sees its own loss, and would search for itself. Use an optimizer "
                "that calls it once, or a plan that averages weights, such as diloco()."
            )
        self._clipping.clip(optimizer)

    def before(self, optimizer: ScaledSteps, step_follows: bool = True) -> None:
        """Average and check gradients with the other workers, also where this worker then takes no step."""
        self.levels.raise_if_broken()
        self._held.refresh()
        self.step = self.headers.step - 1  # which has counted on, where this worker had run out of data (DDP's join)
        if self.at_first_step is not None:
            self.at_first_step(self.levels)
            self.at_first_step = None
        if self.plan.needs_anchor and self.step + 1 >= self.plan.schedule.start:
            self.weights.anchor.begin_step(first=self.clock.since == self.step)
        if optimizer in self._stepped:
            raise RuntimeError(_stepped_twice(optimizer, self.waiting))
        self._read_lr()
        if self._void is True:  # no worker averages any more in this step: nobody would use the means
            self._averager.check.forget()
        else:
            self._received(self.path.before_optimizer(optimizer))
            if self._gradient is not None:
                self._check_finite(self._gradient, optimizer)
        if not step_follows:
            return
        if self._void is True:
            optimizer.skip_step()
            return
        self._clipping.clip(optimizer)
        if isinstance(self._void, Tensor):
            optimizer.skip_step_if(self._void)

    def _read_lr(self) -> None:
        """Note the learning rate of the round: that of its first step, or a larger one where the period follows it."""
        first = self.clock.since == self.step
        if first or (self.step > self.clock.since and isinstance(self.plan.schedule, Quadratic)):
            lr = float(self.scaled[0].optimizer.param_groups[0].get("lr", inf))
            self.clock = SyncClock(self.clock.since, lr if first else max(lr, self.clock.lr))

    def _received(self, headers: Headers | None) -> None:
        if headers is None:
            return
        assert self._gradient is not None
        self.headers.received(headers, among_all=self.levels[self._gradient.level] is self.levels.world)
        if self.headers.stop_due and self.path.in_backward:
            self.headers.stop.exchanged(self.headers.step, headers.slowest_ms)
            self.headers.stop_due = False  # once in a step, whatever the number of optimizers

    def _check_finite(self, sync: Sync, optimizer: ScaledSteps) -> None:
        """Find out whether the gradients that were averaged since the last optimizer's step are finite."""
        check, queue = self._averager.check, self.levels[sync.level]
        if self.begins:
            check.report_late(self._model_state.originals)
        if optimizer.scaled:
            if self.path.in_backward and self._averager.lacks_scale:
                raise RuntimeError(
                    f"{self.plan!r} under a GradScaler: gradients are averaged in backward, times the loss scale, and "
                    "residuals of one step do not fit the scale of another. Let the session read it: attach(..., "
                    "scaler=scaler). Or attach to the bare module, which averages unscaled gradients."
                )
            check.forget()  # the GradScaler decides
        elif check.late:
            flag = check.nonfinite_flag(queue, self._gradients, self.headers.step)
            if flag is not None:
                self._void = flag if self._void is False else torch.maximum(flag, torch.as_tensor(self._void))
        else:
            self._void = check.has_nonfinite(queue, self._gradients, self.headers.step)

    def _gradients(self) -> dict[str, Tensor | None]:
        grads = self._model_state.gradients()
        return {name: g.to_dense() if g is not None and g.is_sparse else g for name, g in grads.items()}

    def stepped(self, optimizer: ScaledSteps) -> bool:
        """Note that an optimizer has stepped; return whether that was the last of this step."""
        self._stepped.append(optimizer)
        return not self.waiting

    def after(self) -> None:
        """Count a step, and synchronise weights where the plan says so."""
        self.step += 1
        if self.weights.in_flight:
            self.weights.settle(self.plan, self.step)
        for sync in self.plan.syncs_at(self.step, self.clock):
            if sync.payload is Payload.WEIGHTS:
                self.weights.sync(self.plan, sync, self.headers)
                if sync.part is None and self.plan.is_outermost(sync):
                    self.clock = SyncClock(self.step)
                    self._compare_weights(local=self.plan.schedule.period > 1)
        if self._gradient is not None and self._gradient.level is None:
            self.path.after_optimizer()
            if not self.path.joining:
                self._compare_weights(local=False)
        self.prepare()

    def _compare_weights(self, local: bool) -> None:
        self.divergence.after_sync(self.levels.world, self._model_state.params, local, self.step)

    def average_weights(self, optimizers: bool = False, force: bool = False) -> None:
        """Average the weights of all workers, where local steps have made them different, and the optimizers' state."""
        self.weights.settle(self.plan, step=sys.maxsize)
        different = optimizers or force or self.clock.since != self.step
        if self.plan.local and self.step >= self.plan.schedule.start and different:
            self.weights.average_all(self.headers, optimizers)

    def change(self, plan: Plan) -> None:
        """Go on with another plan, which delivers the residuals of the old codec (`carry_over.py`)."""
        if not isinstance(plan, Plan):
            raise TypeError(f"change({plan!r}): a Plan is needed, such as laconic.power_sgd(rank=4).")
        self.path.check_plan(plan)
        agree(self.levels.world, "the plan to go on with", {"step": self.step, "plan": repr(plan)})
        self.levels.prepare(plan.levels)
        clock = SyncClock(since=max(self.step, plan.schedule.start - 1))
        gradients = any(s.payload is Payload.GRADIENT for s in plan.syncs_at(self.step + 1, clock))
        self.weights.settle(self.plan, step=sys.maxsize)
        lagging = self.plan.needs_anchor and has_feedback(self.plan.codec)
        if lagging:
            apply_residuals(self._model_state.params, self._model_state.state["weights"])
        # Equal gradients move weights alike only if the optimizers' moments are equal, too.
        self.average_weights(optimizers=gradients, force=lagging)
        self._averager.equalise_loss_scale()
        self.plan, self.clock = plan, clock
        self._model_state.reset(carry=gradients)
        self.weights.forget()
        self.prepare()

    def regroup(self, group: dist.ProcessGroup) -> None:
        """Go on with the workers of another group."""
        if self.path.in_backward:
            raise RuntimeError(
                "regroup: a DDP or sharded model cannot leave its process group. Attach to a bare module, which "
                "averages gradients at the optimizer's step."
            )
        self.levels.abandon()
        levels = self.levels.regrouped(self.plan.levels, group)
        self.levels = self.weights.levels = self._averager.levels = levels
        self._averager.check.forget()  # of a step that failed half-way
        self.weights.drop_in_flight()
        self.divergence = DivergenceCheck(self.divergence.every)  # it counts: from now on the same on all workers
        self.prepare()

    def state_dict(self) -> dict[str, Any]:
        """Return what this worker must save besides model and optimizer."""
        weights = self.weights.state_dict()  # first: fragments in flight still change residuals
        return {
            "plan": repr(self.plan),
            "step": self.step,
            "since": self.clock.since,
            "lr": self.clock.lr,
            "layout": self.path.layout(),
            **self._model_state.state_dict(),
            **weights,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        if saved["plan"] != repr(self.plan):
            raise ValueError(
                f"this state was saved under {saved['plan']} and the plan is {self.plan!r}: the state of one codec is "
                f"of no use to another. Attach laconic.plan({saved['plan']!r}), load, then change(...) to the new plan."
            )
        self.step = saved["step"]
        self.clock = SyncClock(saved["since"], saved["lr"])
        self._model_state.load_state_dict(saved)
        self.path.repeat_layout(saved["layout"])
        self.weights.load_state_dict(saved)
        self.headers.stop.restart()
        self.prepare()


def _stepped_twice(optimizer: ScaledSteps, waiting: Sequence[ScaledSteps]) -> str:
    name, others = type(optimizer.optimizer).__name__, ", ".join(type(each.optimizer).__name__ for each in waiting)
    return (
        f"{name} steps twice, and {others} has not stepped yet: a step is over when each optimizer that attach was "
        "given has stepped once. For parts of a model that step at different rates, attach a session to each: "
        "attach(plan, model.part, optimizer)."
    )
