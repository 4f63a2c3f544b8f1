"""A simulated training: each worker is a thread with a session of its own, unchanged, on an `InProcessGroup`.

The losses are those of real processes over gloo, bit for bit, as the lab's script trains them, with as many threads
for each operation. Where all workers hold the same weights (plans that average gradients), they share one copy of them
and one optimizer: worker 0 steps, and the others count the step. A worker that is lost is missing from the next
collective. The others then go back to the last commit and go on without it, as an elastic run does.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from laconic import Ledger, LostWorkerError, Plan, Session, attach
from laconic.plans.schedules import Never, Streaming
from laconic.tools.lab.script import lr_share
from laconic.tools.machine import usable_cores
from laconic.tools.simulate.clock import VirtualClock
from laconic.tools.simulate.conditions import Conditions, Failure
from laconic.tools.simulate.in_process import InProcessGroup, InProcessWorld, Members
from laconic.tools.simulate.ring import ring_sum
from laconic.tools.simulate.tasks import SimulatedTask


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

    @property
    def shares_weights(self) -> bool:
        """Whether workers hold the same weights after every step, so that one copy is enough."""
        return not self.plan.local and not self.failures


@dataclass(frozen=True)
class SimulatedStep:
    """One step of all workers: the loss of each, the latest virtual time, and what the first has sent so far."""

    step: int
    losses: tuple[float, ...]
    seconds: float
    sent_bytes: int

    @property
    def loss(self) -> float:
        """The mean of the workers' losses."""
        return fmean(self.losses)


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """A worker's state after a commit."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    session: dict[str, Any]


@dataclass(eq=False)
class Training:
    """Runs a simulation; iterate over `steps()`."""

    run: SimulatedRun
    task: SimulatedTask
    clock: VirtualClock = field(init=False)
    models: list[nn.Module] = field(init=False)
    threads: int = field(init=False)
    """Threads of each operation: as many as the lab's script gives its workers on this machine."""

    def __post_init__(self) -> None:
        run, cores = self.run, usable_cores()
        self.threads = max(1, cores // run.workers)
        schedule = run.plan.schedule
        delay = schedule.delay if isinstance(schedule, Streaming) else 0
        self.clock = VirtualClock(run.workers, run.conditions, overlap=not run.failures, delay=delay)
        self.models = [self.task.model, *(self._copy() for _ in range(1, run.workers))]
        at_once = max(1, cores // self.threads)
        self._world = InProcessWorld(run.workers, at_once, first_ahead=run.shares_weights, served=self.clock.served)
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
        plan, models = self.run.plan, [self.models[worker] for worker in self.alive]
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

    def level_bytes(self) -> dict[str, int]:
        """Return what the first worker that is left has sent, by level."""
        totals = self._ledgers[self.alive[0]].totals(by="level")
        return {level: total.wire_bytes for level, total in totals.items()}

    def _copy(self) -> nn.Module:
        made = deepcopy(self.task.model)
        if self.run.shares_weights:
            for own, shared in zip(made.parameters(), self.task.model.parameters(), strict=True):
                own.data = shared.data
        return made

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
        session = attach(run.plan, model, optimizer, group=group, ledger=self._ledgers[worker])
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
        if run.shares_weights and worker > 0:
            session.skip()  # worker 0 has stepped, or will before this one goes on
        else:
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
            committed = commits.snapshot.session["step"]
            self.clock.rewind(alive, committed)
            self._ended.clear()
            self._next = committed + 1
        self._world.barrier(worker)
        commits.session.regroup(self._world.group(worker, alive))
        commits.restore()


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
    """Average as workers do over gloo when they validate (`compare/validating.py`)."""
    return (ring_sum([row.flatten() for row in rows]) / len(rows)).view(rows[0].shape)


class _Commits:
    """The last commit of a worker: after a synchronisation of all workers, with nothing in flight."""

    def __init__(self, run: SimulatedRun, session: Session, model: nn.Module, optimizer: AdamW) -> None:
        self.session = session
        self._run, self._model, self._optimizer = run, model, optimizer
        self._synced = False
        if run.failures:
            self._take()

    def after_step(self) -> None:
        """Commit if that is due. Only the commit before a failure is of use."""
        self._synced |= self.session.synced
        last = max((each.step for each in self._run.failures), default=0)
        if self.session.step >= last or not self._synced or self.session.in_flight:
            return
        self._synced = False
        step = self.session.step
        if self._run.plan.local or any(each.step == step + 1 for each in self._run.failures):
            self._take()

    def _take(self) -> None:
        states = (self._model.state_dict(), self._optimizer.state_dict(), self.session.state_dict())
        self.snapshot = _Snapshot(*deepcopy(states))

    def restore(self) -> None:
        """Load the last commit."""
        self._model.load_state_dict(self.snapshot.model)
        self._optimizer.load_state_dict(deepcopy(self.snapshot.optimizer))
        self._optimizer.zero_grad()
        self.session.load_state_dict(self.snapshot.session)
        self._synced = False
