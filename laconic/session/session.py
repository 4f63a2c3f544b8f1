"""The session: a plan at work on a model and its optimizers.

    session = laconic.attach(laconic.power_sgd(rank=4), model, optimizer)

The training loop does not change. DDP and FSDP2 models average gradients in backward, bare modules at the optimizer's
step. Weights are synchronised right after it. In other steps nothing is sent, DDP's own broadcasts included.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from laconic.checks.divergence import DivergenceCheck
from laconic.checks.finite import NonFinite, check_policy
from laconic.ledger import Ledger
from laconic.plans.plan import Plan
from laconic.session.closures import Arguments, run_when_ready
from laconic.session.grad_scaler import ScaledSteps
from laconic.session.gradients import GradientAverager
from laconic.session.health import Health
from laconic.session.metrics import Reported, samples
from laconic.session.observers import StepObserver, Validation
from laconic.session.other_optimizers import OtherOptimizers
from laconic.session.steps import Steps
from laconic.session.weights import Commit
from laconic.torch_private.optimizers import is_nested_step


class Session:
    """A plan at work; `laconic.attach` makes it. A context manager: leaving it detaches."""

    def __init__(self, steps: Steps, averager: GradientAverager, ledger: Ledger) -> None:
        self.ledger = ledger
        self.health: Health | None = None
        """The last measurement of the guard; None without one. See `attach(guard=...)`."""
        self._steps, self._averager = steps, averager
        self._removals: list[Callable[[], None]] = []
        self._reported = Reported()
        self._observers: list[StepObserver] = [self._reported]

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self._steps.plan

    @property
    def attached(self) -> bool:
        """Whether its hooks are installed: from the end of `attach` until `detach`."""
        return bool(self._removals)

    @property
    def step(self) -> int:
        """Optimizer steps of the run, those before a resume included."""
        return self._steps.step

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self._steps.levels.world.workers

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group that the session uses for all workers; None in a world of one."""
        return self._steps.levels.world.group

    @property
    def timeout_s(self) -> float | None:
        """How long the next collective among all workers may take; None in a world of one, and over NCCL."""
        return None if (timeout := self._steps.levels.world.timeout) is None else timeout.limit_s

    @property
    def optimizers(self) -> list[Optimizer]:
        """The torch optimizers whose steps the session counts, without what a framework has put around them."""
        return [each.optimizer for each in self._steps.scaled]

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The trained parameters by name, as the model and the optimizers know them."""
        self._averager.model_state.refresh()
        return self._averager.model_state.originals

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The floating-point buffers by name."""
        self._averager.model_state.refresh()
        return self._averager.model_state.buffers

    @property
    def error(self) -> BaseException | None:
        """The error that broke a collective among all workers. Nothing can be synchronised after it until `regroup`."""
        return self._steps.levels.world.broken

    @property
    def synced(self) -> bool:
        """Whether the last step synchronised among all workers. The same on all of them."""
        return self._steps.synced

    @property
    def in_flight(self) -> bool:
        """Whether a fragment was sent and has not taken effect yet."""
        return self._steps.weights.in_flight

    @property
    def can_regroup(self) -> bool:
        """Whether `regroup` is possible: the model is neither DDP nor sharded."""
        return not self._steps.path.in_backward

    @property
    def commit(self) -> Commit:
        """How synchronised weights take effect: "streaming" or "atomic". See `attach`."""
        return self._steps.weights.commit

    @commit.setter
    def commit(self, commit: Commit) -> None:
        self._steps.weights.commit = commit

    @property
    def nonfinite(self) -> NonFinite:
        """What NaN or Inf on one worker leads to. See `attach`. Every worker sets it after the same step."""
        return self._averager.check.policy

    @nonfinite.setter
    def nonfinite(self, policy: NonFinite) -> None:
        check_policy(policy)
        self._averager.check.policy = self._steps.weights.nonfinite = policy

    @property
    def verify_every(self) -> int | None:
        """After how many synchronisations weights are compared. See `attach`. Every worker sets it at the same step."""
        return self._steps.divergence.every

    @verify_every.setter
    def verify_every(self, every: int | None) -> None:
        self._steps.divergence = DivergenceCheck(every)

    def average_gradients(self, optimizer: Optimizer | None = None) -> None:
        """On a bare module: average the gradients now instead of at the optimizer's step.

        For code that needs them before the step, such as clipping by norm. With a GradScaler, `scaler.unscale_` comes
        first. Of several optimizers, those that have yet to step in this step are meant, or the one that is given.
        """
        self._steps.average_gradients(optimizer)

    def average_weights(self) -> None:
        """Average the weights of all workers now, exactly, where local steps have made them different.

        To save or evaluate one model. Every worker calls it after the same step. Fragments in flight take effect first.
        """
        self._steps.average_weights()

    def skip(self) -> None:
        """Count a step without calling the optimizer, for loops that skip an update on this worker only.

        The others may be about to synchronise, and this one must take part. Steps that a GradScaler skips are counted
        without it. It stands for all optimizers that have yet to step; others step these in the order of `attach`.
        """
        for each in self._steps.waiting:
            self._before(each, step_follows=False)
            self._steps.stepped(each)
        self._after()

    def report(self, *, loss: float | Tensor, tokens: int = 0, validation: Validation | None = None) -> bool:
        """Pass the loss of a step to the observers, such as that of `laconic compare`; return whether to stop.

        Call it after each step, or each few, on every worker. `tokens` are how many this worker used. `validation` is a
        validation loss, or a function that computes it: `laconic compare` calls it, on the mean of all weights.
        """
        return sum(observer.report(self, loss, tokens, validation) for observer in self._observers) > 0  # each gets it

    def metrics(self) -> dict[str, float]:
        """Return this worker's metrics (docs/metrics.md). Sends nothing; may wait for a GPU, so not at every step."""
        return {each.key: each.value for each in samples(self)}

    def stop_on(self, *signals: signal.Signals, every_s: float = 0.5) -> None:
        """Stop on these signals, by default SIGTERM. Every worker calls it, before the first step.

        When one worker gets one, `should_stop` becomes True on all after the same step (under `alone()` on this one):
        save, and leave the loop. DDP and sharded models then exchange a header of 50 bytes every `every_s` seconds.
        """
        self._steps.stop_on(signals or (signal.SIGTERM,), every_s)

    @property
    def should_stop(self) -> bool:
        """Whether some worker got a signal to stop, and all workers know it. The same on all after each step."""
        return self._steps.headers.stop.agreed

    def observe(self, observer: StepObserver) -> None:
        """Add an observer."""
        self._observers.append(observer)
        observer.attached(self)

    def change(self, plan: Plan) -> None:
        """Go on with another plan from the next step. Every worker calls it after the same step.

        Weights that differ after local steps are averaged first; so are moments, if the new plan averages gradients.
        It sends residuals of gradients with the next 32, or drops them if it averages none. Those of deltas: applied.
        """
        self._steps.change(plan)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather a row of numbers from every worker, in their order. Every worker calls it with as many numbers."""
        return list(self._steps.levels.world.gather(torch.tensor(numbers, dtype=torch.int64)).tolist())

    def regroup(self, group: dist.ProcessGroup) -> None:
        """Go on with the workers of another group, after some were lost or new ones came. For bare modules.

        All workers of the new group call it after the same step. Collectives in flight in the old group are left
        behind; this worker's residuals, its anchor and its step stay as they are.
        """
        self._steps.regroup(group)

    def abandon(self) -> None:
        """Leave the group, with the collectives that are in flight. `regroup` goes on in another."""
        self._steps.levels.abandon()

    def away(self, limit_s: float = 3600.0) -> AbstractContextManager[None]:
        """Return a context in which the others wait for this worker, such as to evaluate, for up to `limit_s`."""
        return self._steps.levels.away(limit_s)

    def cancel_wait(self) -> None:
        """End the wait for a collective that is in progress, with a `LostWorkerError`. Safe in any thread."""
        self._steps.levels.cancel_wait()

    def detach(self) -> None:
        """Remove all hooks. A DDP model then averages gradients as DDP does."""
        while self._removals:
            self._removals.pop(0)()
        self._steps.path.detach()
        self._steps.weights.forget()
        self._steps.levels.close()
        while self._observers:
            self._observers.pop(0).detached(self)

    def state_dict(self) -> dict[str, Any]:
        """Return what this worker must save besides model and optimizer. Each worker saves its own."""
        return self._steps.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. The plan must be the one that was saved."""
        self._steps.load_state_dict(saved)

    def install(self) -> None:
        """Install the hooks: `attach` calls it once, after everything that may refuse."""
        try:
            self._steps.path.install()
            for each in self._steps.scaled:
                self._removals += [
                    each.declare().remove,
                    each.optimizer.register_step_pre_hook(partial(self._before_step, each)).remove,
                    each.optimizer.register_step_post_hook(partial(self._after_step, each)).remove,
                ]
            self._removals.append(OtherOptimizers(self._averager.model_state, self.optimizers).install().remove)
            self._steps.prepare()
        except BaseException:
            self.detach()
            raise

    def _before_step(self, scaled: ScaledSteps, optimizer: Optimizer, args: Any, kwargs: Any) -> Arguments | None:
        return None if is_nested_step(optimizer) else run_when_ready(args, kwargs, partial(self._ready, scaled))

    def _ready(self, scaled: ScaledSteps, evaluations: int) -> None:
        if evaluations == 1:
            self._before(scaled, step_follows=True)
            scaled.begin_step()
        else:
            self._steps.evaluated_again(scaled)

    def _after_step(self, scaled: ScaledSteps, optimizer: Optimizer, *_: object) -> None:
        if not is_nested_step(optimizer):
            scaled.end_step()
            if self._steps.stepped(scaled):
                self._after()

    def _before(self, scaled: ScaledSteps, step_follows: bool) -> None:
        for observer in self._observers if self._steps.begins else ():
            observer.before_step(self)
        self._steps.before(scaled, step_follows)

    def _after(self) -> None:
        self._steps.after()
        for observer in self._observers:
            observer.after_step(self)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        return f"<Session {self.plan!r} at step {self.step}, {self.workers} workers>"
