"""The training loop of an elastic run: commits steps, and takes a worker from one generation to the next.

    steps(total)     form the first group, then one `Step` after another
    _end_step        1. commit, if all workers have synchronised   2. after a loss, or if workers wait: _recover
    _recover         1. leave the old group   2. rendezvous: who is here   3. connect   4. the state of the last commit

After a step that synchronised all workers, each worker copies its state to host memory, and gathers four numbers from
all others. A worker that has gathered them knows that all others hold the same snapshot: the step is committed, and is
not lost while one of these workers lives. When a worker is lost, the others may differ by one commit. So each keeps
its last two snapshots.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic import DisagreementError, LostWorkerError, Never, Session
from laconic.elastic.group import connect, leave, regroup, transfer
from laconic.elastic.history import Committed, History, SampleLedger, Samples, SnapshotStore
from laconic.elastic.rendezvous import Member, Membership
from laconic.elastic.world import ElasticWorld
from laconic.errors import ElasticError, EndedError, ReplacedError, StoreLostError
from laconic.session.session import Stateful
from laconic.values import is_whole

logger = logging.getLogger("laconic.elastic")

ATTEMPTS = 100
"""How many groups may fail to form, one after the other, before the run ends."""


class Step:
    """One step of the loop; `number` counts from 1. A context manager: a step that loses a worker is undone."""

    def __init__(self, number: int, worker: int, workers: int, end: Callable[[BaseException | None], bool]) -> None:
        self.number, self.worker, self.workers = number, worker, workers
        self._end = end

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._end(error)

    def __repr__(self) -> str:
        return f"<Step {self.number}, worker {self.worker} of {self.workers}>"


class CommitClock:
    """Decides after each step whether to commit it: every `every` synchronisations among all workers.

    The decision is the same on all workers. A commit waits for the means of fragments in flight, so it comes when none
    is; where one always is, once a period.
    """

    def __init__(self, session: Session, every: int = 1) -> None:
        self._session, self._every = session, every
        self.reset()

    def reset(self) -> None:
        """Start counting again, from a step that all workers share."""
        self._since, self._synced, self._count = self._session.step, False, 0

    def is_due(self) -> bool:
        """Return whether to commit the step that has just ended. Called once after each step."""
        session = self._session
        self._synced |= session.synced
        if not self._synced or (session.in_flight and session.step < self._since + session.plan.schedule.period):
            return False
        self._since, self._synced = session.step, False
        self._count += 1
        return self._count % self._every == 0


def objects_of(
    session: Session, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], also: Mapping[str, Stateful] | None
) -> dict[str, Stateful]:
    """Name every object whose state belongs to a step, and make the session average weights in copies.

    A lost worker that continues may still write into buffers of a collective that the others have abandoned: these
    must not be the weights, which the others have restored from a snapshot by then.
    """
    _check_bare(session, model)
    session.commit = "atomic"
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    return {
        "model": model,
        **{f"optimizer {index}": each for index, each in enumerate(optimizers)},
        "session": session,
        **{f"also {name}": each for name, each in (also or {}).items()},
    }


def _check_bare(session: Session, model: nn.Module) -> None:
    """Refuse models that keep a process group, which is lost with its first worker."""
    wrapped = any(isinstance(each, DistributedDataParallel) for each in model.modules())
    if not wrapped and session.can_regroup:
        return
    raise ValueError(
        f"Run(model={type(model).__name__}): {'DistributedDataParallel' if wrapped else 'FSDP'} keeps the process "
        "group that it was made with, and an elastic run makes a new one whenever workers come or go. Leave the "
        "wrapper out and attach to the bare module: laconic.attach(laconic.ddp(), model, optimizer) averages the same "
        "gradients, at the optimizer's step."
    )


def is_loss(session: Session, error: BaseException) -> bool:
    """Return whether an error means that workers were lost, and is not the user's own."""
    return isinstance(error, LostWorkerError) or error is session.error


class Run:
    """One worker of a run whose workers may come and go.

    `also` are other objects whose state belongs to a step, such as a learning rate scheduler. Every `every`-th
    synchronisation of all workers is committed. With a `folder`, every worker saves its state there when it ends or
    leaves, and every `save_every` commits; a run that is started again continues from there. `on_commit` is called
    once with each commit.
    """

    def __init__(
        self,
        world: ElasticWorld,
        session: Session,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        also: Mapping[str, Stateful] | None = None,
        every: int = 1,
        folder: str | Path | None = None,
        save_every: int | None = None,
        on_commit: Callable[[Committed], None] | None = None,
    ) -> None:
        for word, value in (("every", every), ("save_every", save_every)):
            if value is not None and not is_whole(value):
                raise ValueError(f"Run({word}={value!r}): {word} must be a whole number of at least 1.")
        if isinstance(session.plan.schedule, Never):
            raise ValueError(
                "Run(session of alone()): a step is committed when all workers have synchronised, and these never do. "
                "Choose a plan that synchronises, such as laconic.diloco(), or train without laconic.elastic."
            )
        self.world, self.session = world, session
        self._save_every = save_every
        store = None if folder is None else SnapshotStore(Path(folder), world.id)
        self._history = History(objects_of(session, model, optimizer, also), store, on_commit)
        self._commits = CommitClock(session, every)
        self._samples = SampleLedger(session)
        self._membership: Membership | None = None
        self._known: set[str] = set()
        """The ids of all members so far."""
        self._stop = self._leave_asked = self._ended = False
        self._total = 0
        self._idle = True
        """Whether no collective of a group that failed to form is in flight."""
        self.stopped = False
        """Whether the loop has ended early, because a worker called `stop`, or this one `leave`."""

    @property
    def worker(self) -> int:
        """The rank of this worker. It changes when workers come or go."""
        return next(rank for rank, each in enumerate(self._formed.members) if each.tag == self.world.tag)

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self._formed.members)

    @property
    def _formed(self) -> Membership:
        if self._membership is None:
            raise RuntimeError(
                "Run.worker, Run.workers: there is no group yet. The first step forms it: use step.worker and "
                "step.workers inside `for step in run.steps(total)`."
            )
        return self._membership

    @property
    def _step(self) -> int:
        """The step of the run, the same on all workers after each synchronisation."""
        return int(self.session.progress)

    @property
    def members(self) -> tuple[str, ...]:
        """The ids of the workers, in the order of their ranks."""
        return () if self._membership is None else tuple(each.id for each in self._membership.members)

    @property
    def samples(self) -> Samples:
        """What became of the samples that this worker drew with a `laconic.data.ElasticSampler`."""
        return self._samples.now

    @property
    def generation(self) -> int:
        """The number of the current group: it grows whenever workers come or go."""
        return self._history.generation

    @property
    def leaving(self) -> bool:
        """Whether this worker leaves the run: `leave` was called, or its torchrun agent is gone."""
        return self._leave_asked or self.world.orphaned

    def stop(self) -> None:
        """End the loop on all workers after the next commit. Safe in a signal handler."""
        self._stop = True

    def leave(self) -> None:
        """End the loop on this worker after the current step; the others continue. Safe in a signal handler."""
        self._leave_asked = True

    def leave_on(self, *signals: signal.Signals) -> None:
        """Leave at these signals, by default SIGTERM, which torchrun sends before it restarts a worker."""
        for each in signals or (signal.SIGTERM,):
            signal.signal(each, lambda *_: self.leave())

    def steps(self, total: int) -> Iterator[Step]:
        """Iterate over the steps up to `total`. Enter each step with `with`, and call the optimizer once in it.

        First it forms the group: it waits for the other workers, and continues from their last commit. At the end,
        weights that local steps have made different are averaged. It ends early after `stop`, on all workers, or
        `leave`, on this one.
        """
        self._total, self._ended = total, False
        self._history.begin(self._step)
        self._recover()
        while not self._finished():
            yield Step(self.session.step + 1, self.worker, self.workers, self._end_step)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave_group()
        if not isinstance(self.world.monitor.error, ReplacedError):  # else the folder belongs to the other process
            self._history.close()
        self.session.detach()
        self.world.leave()

    def _finished(self) -> bool:
        """Return whether the loop is over. The last step is committed whatever the schedule."""
        if self.leaving and not (self.stopped or self._ended):
            self._leave_run()
        while not self.stopped and not self._ended and self._step >= self._total:
            try:
                if self._history.newest.step < self._step:
                    self.session.average_weights()
                self._commit()
                self._ended = True
                with contextlib.suppress(StoreLostError):  # all workers have finished, with or without the store
                    self.world.record_end(self.generation, self._step)
            except RuntimeError as error:
                if not self._recovers_from(error):
                    raise
        return self.stopped or self._ended

    def _end_step(self, error: BaseException | None) -> bool:
        """Commit the step if that is due; if a worker was lost, go back to the last commit.

        Returns whether `error` was handled.
        """
        if error is not None:
            return self._recovers_from(error)
        self._history.check_kept()
        try:
            if self._commits.is_due() and self._step < self._total and self._commit():
                self._recover()
        except RuntimeError as lost:
            if not self._recovers_from(lost):
                raise
        return False

    def _commit(self) -> bool:
        """Take a snapshot, and commit it when all other workers have taken theirs.

        Returns whether to form a new group: a worker wants to join, or a member has lost the store.
        """
        monitor = self.world.monitor
        if isinstance(monitor.error, ReplacedError):
            raise monitor.error
        # 1. Copy the state to host memory. It does not count yet.
        step = self._step
        self._history.take(step, self.members)
        self._samples.took(step)
        # 2. Gather four numbers of each worker: one that has all of them knows that the others hold the snapshot.
        rows = self.session.gather([step, self._stop, monitor.join_requested, monitor.error is not None])
        steps, stops, joins, failures = zip(*rows, strict=True)
        if set(steps) != {step}:
            raise DisagreementError(
                f"after the same synchronisation, workers are at the steps {list(steps)}. Every worker must call its "
                "optimizer once in each step."
            )
        # 3. It counts. All workers have the same rows, so they decide the same.
        self._history.commit(self._save_every)
        self._samples.committed(step)
        self.stopped = any(stops)
        return not self.stopped and any(joins + failures)

    def _recovers_from(self, error: BaseException) -> bool:
        """Continue without the workers that were lost, and return True; False for any other error."""
        if not is_loss(self.session, error):
            return False
        self._history.check_kept()
        after = self._history.newest.step
        logger.warning("a worker was lost after step %d; the run goes on: the others form a new group.", after)
        logger.info("how it was noticed: %s", error)
        self._recover()
        return True

    def _recover(self) -> None:
        """Form the next generation, and continue from the newest commit that all of its members hold."""
        world, history = self.world, self._history
        for _ in range(ATTEMPTS):
            self._leave_group()
            steps = tuple(each.step for each in history.snapshots)
            member = Member(world.id, world.tag, history.generation, steps, history.in_memory)
            membership = world.rendezvous.join(member, self._is_over)
            if membership is None:
                self._leave_run() if self.leaving else self._end_with_others()
                return
            if self._form_group(membership):
                return
        raise ElasticError(f"no group could be formed in {ATTEMPTS} attempts. Is the network between workers open?")

    def _is_over(self) -> bool:
        ended = None if self.leaving else self.world.ended()
        return self.leaving or (ended is not None and ended[1] >= self._total)

    def _leave_group(self) -> None:
        """Leave the current group, if there is one. After an error, collectives may still be in flight."""
        self.world.monitor.on_death = None
        session, group = self.session, self.session.group
        arrived = not session.in_flight or self._step == self._history.newest.step  # a snapshot waits for fragments
        idle = self._idle and session.error is None and arrived
        session.abandon()
        leave(0 if idle else self.world.timeout_s, group)
        self._idle = True

    def _leave_run(self) -> None:
        """End the loop on this worker alone, with its newest snapshot."""
        self._leave_group()
        self._history.rewind()
        newest = self._history.newest
        self._samples.resumed(newest.step if newest.by is None else None)
        self.stopped = True

    def _end_with_others(self) -> None:
        """End the loop, if the run ended with the step that this worker holds."""
        history = self._history
        if self.world.ended() != (history.generation, history.newest.step):
            raise EndedError(
                f"the run ended at step {self._total} without worker {self.world.id!r}: the other workers hold its "
                "result. For a run of its own, join with another run= or store."
            )
        history.resume(history.newest, history.generation)
        self._samples.resumed(history.newest.step)
        self._ended = True

    def _form_group(self, membership: Membership) -> bool:
        """Form the group of a membership; return whether all members could."""
        self._idle = False
        try:
            self._connect(membership)
        except RuntimeError as error:
            self.world.report_failure(membership)
            if isinstance(error, ElasticError):
                raise
            why, attempt = str(error).partition("\n")[0], membership.attempt
            logger.info("the group of attempt %d was not formed, the next attempt follows: %s", attempt, why)
            return False
        self._idle = True
        return True

    def _connect(self, membership: Membership) -> None:
        """Connect to the other members, and continue from the step that all of them agree on."""
        world, before, self._membership = self.world, self.members, membership
        check = partial(world.check_forming, membership)  # ends every wait below when a member dies
        # 1. The process group of the members.
        world.barrier("ready", membership)
        with world.store.cancelled_by(check):
            group = connect(world.store, f"{membership.attempt}/group", self.worker, self.workers)
            regroup(self.session, group, world.timeout_s)
            # 2. The state of the last commit: this worker's own, or that of the member that sends it.
            snapshot = transfer(membership, self.worker, self._history, group, world.timeout_s, check)
        self._history.resume(snapshot, membership.generation, save=self._save_every is not None)
        self._samples.resumed(snapshot.step)
        self._commits.reset()
        # 3. Once all hold it, older generations may not continue.
        world.barrier("resumed", membership)
        world.rendezvous.confirm(membership)
        world.monitor.watch_for_joins(membership.attempt + 1)
        world.monitor.on_death = self.session.cancel_wait
        change = describe_change(before, self.members, self._known, membership.base) if before else ""
        logger.log(logging.WARNING if change else logging.INFO, "%s", change or _go_on(self.members, membership.base))
        self._known.update(self.members)


def describe_change(before: Sequence[str], after: Sequence[str], known: Collection[str], step: int) -> str:
    """Return who is gone, who has come and who goes on; "" if no member has changed. `known` were members before.

    >>> describe_change(["0", "1", "2"], ["0", "2"], {"0", "1", "2"}, step=40)
    'worker 1 is gone; workers 0, 2 go on after step 40, 2 in all.'
    >>> describe_change(["0", "2"], ["0", "1", "2", "3"], {"0", "1", "2"}, step=60)
    'worker 1 is back; worker 3 has joined; workers 0, 1, 2, 3 go on after step 60, 4 in all.'
    """
    gone = [id for id in before if id not in after]
    back = [id for id in after if id not in before and id in known]
    new = [id for id in after if id not in before and id not in known]
    parts = [(gone, "is gone", "are gone"), (back, "is back", "are back"), (new, "has joined", "have joined")]
    changes = [f"{_named(ids)} {several if len(ids) > 1 else one}" for ids, one, several in parts if ids]
    return "; ".join([*changes, _go_on(after, step)]) if changes else ""


def _go_on(ids: Sequence[str], step: int) -> str:
    return f"{_named(ids)} {'go' if len(ids) > 1 else 'goes'} on after step {step}, {len(ids)} in all."


def _named(ids: Sequence[str]) -> str:
    return f"worker{'s' * (len(ids) > 1)} {', '.join(ids)}"
