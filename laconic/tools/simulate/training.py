"""A simulated training: each worker is a thread with a session of its own, unchanged, on an `InProcessGroup`.

The losses are those of real processes over gloo, bit for bit, as the lab's script trains them, with as many threads
for each operation. A worker that is lost is missing from the next collective. The others then go back to the last
commit and go on without it, as an elastic run does.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from laconic import Ledger, LostWorkerError, Plan, Session, attach
from laconic.comm.groups import workers_on_this_machine
from laconic.cost import facts_of
from laconic.elastic.run import CommitClock
from laconic.plans.schedules import Never, Streaming
from laconic.tools.errors import UsageError
from laconic.tools.lab.script import lr_share
from laconic.tools.lab.tasks import Lab, loss_of, make_task, validation_loss
from laconic.tools.machine import usable_cores
from laconic.tools.planner.shapes import made_by
from laconic.tools.simulate.clock import Conditions, SimulatedOutcome, SimulatedStep, VirtualClock
from laconic.tools.simulate.in_process import InProcessGroup, InProcessWorld, Members, ring_sum

Loss: TypeAlias = Callable[[nn.Module, int, int], Tensor]
"""Returns the loss of a model on the batch of (worker, step)."""


@dataclass(frozen=True, eq=False)
class SimulatedTask:
    """A new model, its training loss, and its validation loss if there is one."""

    model: nn.Module
    loss: Loss
    validation: Callable[[nn.Module], float] | None = None


def lab_task(settings: Lab) -> SimulatedTask:
    """Make the lab's task that the settings describe. It reads the data."""
    task = make_task(settings)
    return SimulatedTask(
        task.model,
        lambda model, worker, step: loss_of(model, task.draw(worker, step)),
        lambda model: validation_loss(model, task.validation),
    )


def user_task(place: str, seed: int) -> SimulatedTask:
    """Call `module:function()`, which returns a model and a function `loss(model, worker, step)`."""
    rule = "It is called without arguments, and returns (model, loss), where loss(model, worker, step) is a tensor"
    torch.manual_seed(seed)
    made = made_by(place, rule)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise UsageError(f"--model {place}: it returned {type(made).__name__}. {rule}.")
    return SimulatedTask(*made)


@dataclass(frozen=True)
class Failure:
    """A worker that is lost when a step begins."""

    worker: int
    step: int


def failures_of(texts: Sequence[str], workers: int, steps: int) -> tuple[Failure, ...]:
    """Read which workers are lost, and when; at least one stays.

    >>> failures_of(["5@300"], workers=64, steps=1000)
    (Failure(worker=5, step=300),)
    """
    found = []
    for text in texts:
        match = re.fullmatch(r"(\d+)\s*@\s*(\d+)", text.strip())
        if match is None or int(match[1]) >= workers or not 1 <= int(match[2]) <= steps:
            raise UsageError(
                f"--fail {text}: write a worker from 0 to {workers - 1} and a step from 1 to {steps}, such as 5@30: "
                "worker 5 is lost when step 30 begins."
            )
        found.append(Failure(int(match[1]), int(match[2])))
    lost = {each.worker for each in found}
    if len(lost) < len(found) or len(lost) == workers:
        raise UsageError(
            f"--fail {' --fail '.join(texts)}: each worker can be lost once, and one of the {workers} must stay."
        )
    return tuple(found)


@dataclass(frozen=True)
class SimulatedRun:
    """What is simulated: a plan, how many workers and steps, how long things take, and who is lost when."""

    plan: Plan
    workers: int
    steps: int
    lr: float = 5e-3
    bucket_mb: float = 25.0
    conditions: Conditions = field(default_factory=Conditions)
    failures: tuple[Failure, ...] = ()


@dataclass(eq=False)
class Training:
    """Runs a simulation; iterate over `steps()`."""

    run: SimulatedRun
    task: SimulatedTask
    clock: VirtualClock = field(init=False)
    plan: Plan = field(init=False)
    """The plan that is attached: what a target of bytes becomes."""
    models: list[nn.Module] = field(init=False)
    threads: int = field(init=False)
    """Threads of each operation: as many as the lab's script gives its workers on this machine."""

    def __post_init__(self) -> None:
        run, cores = self.run, usable_cores()
        self.threads = max(1, cores // run.workers)
        facts = facts_of(self.task.model, run.workers, machine=workers_on_this_machine(run.workers))
        self.plan = run.plan.resolved(facts)
        self.plan.check_by_steps("A simulation")
        schedule = self.plan.schedule
        delay = schedule.delay if isinstance(schedule, Streaming) else 0
        self.clock = VirtualClock(run.workers, run.conditions, overlap=not run.failures, delay=delay)
        self.models = [self.task.model, *(deepcopy(self.task.model) for _ in range(1, run.workers))]
        at_once = max(1, cores // self.threads)
        self._world = InProcessWorld(run.workers, at_once, served=self.clock.served)
        self._ledgers = [Ledger(keep=0) for _ in range(run.workers)]
        self._lost_at = {each.worker: each.step for each in run.failures}
        self._ended: dict[int, dict[int, tuple[float, float, int]]] = {}
        """Of each step that some workers have ended: their loss, their virtual time, and what they have sent so far."""
        self._next = 1
        self._done: queue.SimpleQueue[SimulatedStep | None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    @property
    def alive(self) -> Members:
        """The workers that were not lost."""
        return self._world.alive

    def steps(self) -> Iterator[SimulatedStep]:
        """Train, and yield each step when all workers have ended it. Steps that a fault undoes come again."""
        threads = [threading.Thread(target=self._work, args=(w,), daemon=True) for w in range(self.run.workers)]
        with _threads(self.threads):
            for thread in threads:
                thread.start()
            try:
                for _ in threads:
                    yield from iter(self._done.get, None)
            except BaseException as error:  # a signal, or a reader that has left: no thread may go on
                self._world.fail(error)
                raise
            finally:
                for thread in threads:
                    thread.join()
        if self._world.error is not None:
            raise self._world.error

    def validation_loss(self) -> float | None:
        """Return the validation loss of the mean of the weights; of workers that never synchronise, the mean loss."""
        validate = self.task.validation
        if validate is None:
            return None
        plan, models = self.plan, [self.models[worker] for worker in self.alive]
        with _threads(self.threads):
            if isinstance(plan.schedule, Never):
                return _mean([torch.tensor([validate(each)], dtype=torch.float64) for each in models]).item()
            if not plan.local or self.run.steps < plan.schedule.start:
                return validate(models[0])
            mean = deepcopy(models[0])
            with torch.no_grad():
                for into, *rows in zip(mean.parameters(), *(each.parameters() for each in models), strict=True):
                    into.copy_(_mean(rows))
            return validate(mean)

    def outcome(self, steps: Sequence[SimulatedStep]) -> SimulatedOutcome:
        """Return the results, when all `steps()` are done."""
        totals = self._ledgers[self.alive[0]].totals(by="level")
        curve = tuple({each.step: each for each in steps}.values())  # a step that was undone comes again
        return SimulatedOutcome(
            plan=repr(self.run.plan),
            workers=self.run.workers,
            parameters=sum(p.numel() for p in self.task.model.parameters() if p.requires_grad),
            steps=curve[-1].step,
            seconds=curve[-1].seconds,
            sent_bytes=curve[-1].sent_bytes,
            use=self.clock.use(),
            left=len(self.alive),
            level_bytes={level: total.wire_bytes for level, total in totals.items()},
            curve=curve,
            validation_loss=self.validation_loss(),
        )

    def _work(self, worker: int) -> None:
        try:
            with self._world.working(worker):
                self._train(worker)
        except BaseException:
            if self._world.error is None:
                raise
        finally:
            self._done.put(None)

    def _train(self, worker: int) -> None:
        run, group = self.run, self._world.group(worker)
        model = self.models[worker]
        if not run.failures:  # a DDP model cannot leave its group
            model = DistributedDataParallel(model, process_group=group, bucket_cap_mb=run.bucket_mb)
        optimizer = AdamW(model.parameters(), lr=run.lr, betas=(0.9, 0.95), weight_decay=0.01)
        session = attach(self.plan, model, optimizer, group=group, ledger=self._ledgers[worker])
        self._world.barrier(worker)  # sessions are listed in one place: no worker changes the list while others step
        commits = _Commits(run, session, model, optimizer)
        while session.step < run.steps:
            if session.step + 1 == self._lost_at.get(worker):
                self._world.lose(worker)
                return
            try:
                self._step(worker, model, optimizer, session)
            except LostWorkerError:
                self._recover(worker, commits)
            else:
                commits.after_step()
        self._world.barrier(worker)
        session.detach()

    def _step(self, worker: int, model: nn.Module, optimizer: AdamW, session: Session) -> None:
        run, step = self.run, session.step + 1
        self.clock.compute(worker, step)
        optimizer.param_groups[0]["lr"] = run.lr * lr_share(step, run.steps)
        loss = self.task.loss(model, worker, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        self.clock.after_step(worker, step)
        self._report(worker, step, float(loss.detach()), session)

    def _report(self, worker: int, step: int, loss: float, session: Session) -> None:
        assert isinstance(session.group, InProcessGroup)
        with self._lock:
            self._ended.setdefault(step, {})[worker] = loss, self.clock.now[worker], session.ledger.wire_bytes
            while self._next <= self.run.steps and self._put_next(session.group.members):
                self._next += 1

    def _put_next(self, members: Members) -> bool:
        """Pass the next step on, if all workers have ended it that are not lost by then; return whether they have."""
        ended = self._ended.get(self._next, {})
        those = [each for each in members if self._lost_at.get(each, self._next + 1) > self._next]
        if not all(each in ended for each in those):
            return False
        losses, times, sent = zip(*(ended[each] for each in those), strict=True)
        self._done.put(SimulatedStep(self._next, losses, max(times), sent[0]))
        del self._ended[self._next]
        return True

    def _recover(self, worker: int, commits: _Commits) -> None:
        """Go back to the last commit, and go on with the workers that are left."""
        self._world.barrier(worker)
        alive = self.alive
        if worker == alive[0]:
            self.clock.rewind(alive, commits.step)
            self._ended.clear()
            self._next = commits.step + 1
        self._world.barrier(worker)
        commits.restore(self._world.group(worker, alive))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let each operation use so many threads while the block runs, also in threads that start in it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _mean(rows: Sequence[Tensor]) -> Tensor:
    """Average as workers do over gloo when they validate (`compare/reporter.py`)."""
    return (ring_sum([row.flatten() for row in rows]) / len(rows)).view(rows[0].shape)


class _Commits:
    """The last commit of a worker, by the rule of elastic runs."""

    def __init__(self, run: SimulatedRun, session: Session, model: nn.Module, optimizer: AdamW) -> None:
        self._run, self._session, self._model, self._optimizer = run, session, model, optimizer
        self._clock = CommitClock(session)
        if run.failures:
            self._take()

    @property
    def step(self) -> int:
        """The step of the last commit."""
        step: int = self._saved[2]["step"]
        return step

    def after_step(self) -> None:
        """Commit if that is due. Only the commit before a failure is of use."""
        step, failures = self._session.step, [each.step for each in self._run.failures]
        due = self._clock.is_due() and step < max(failures, default=0)
        if due and (self._session.plan.local or step + 1 in failures):
            self._take()

    def _take(self) -> None:
        states = (self._model.state_dict(), self._optimizer.state_dict(), self._session.state_dict())
        self._saved: tuple[dict[str, Any], ...] = deepcopy(states)

    def restore(self, group: InProcessGroup) -> None:
        """Load the last commit, and go on in a group of the workers that are left."""
        self._session.regroup(group)
        model, optimizer, session = self._saved
        self._model.load_state_dict(model)
        self._optimizer.load_state_dict(deepcopy(optimizer))
        self._optimizer.zero_grad()
        self._session.load_state_dict(session)
        self._clock.reset()
