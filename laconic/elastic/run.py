"""The training loop of an elastic run: commits steps, and takes a worker from one generation to the next.

After a step that synchronised all workers, each worker copies its state to host memory, and gathers four numbers from
all others. A worker that has gathered them knows that all others hold the same snapshot: the step is committed, and is
not lost while one of these workers lives. When a worker is lost, the others may differ by one commit. So each keeps
its last two snapshots.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from torch import nn
from torch.optim import Optimizer

from laconic import DisagreementError, Never, Session
from laconic.elastic.group import connect, leave, regroup
from laconic.elastic.history import History, SnapshotStore
from laconic.elastic.members_log import MembersLog
from laconic.elastic.parts import is_loss, parts_of
from laconic.elastic.rendezvous import Member, Membership
from laconic.elastic.snapshot import Committed, Stateful
from laconic.elastic.state_transfer import transfer
from laconic.elastic.step import CommitClock, Step
from laconic.elastic.world import ElasticWorld
from laconic.errors import ElasticError, EndedError, ReplacedError, StoreLostError
from laconic.values import is_whole

logger = logging.getLogger("laconic.elastic")

ATTEMPTS = 100
"""How many groups may fail to form, one after the other, before the run ends."""


class Run:
    """A worker's part in a run whose workers may come and go.

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
        self._history = History(parts_of(session, model, optimizer, also), store, on_commit)
        self._commits = CommitClock(session, every)
        self._membership: Membership | None = None
        self._members_log = MembersLog()
        self._stop = self._leave_asked = self._ended = False
        self._total = 0
        self._idle = True
        """Whether no collective of a group that failed to form is in flight."""
        self.stopped = False
        """Whether the loop has ended early, because a worker called `stop`, or this one `leave`."""

    @property
    def worker(self) -> int:
        """The rank of this worker. It changes when workers come or go."""
        assert self._membership is not None, "the group is formed by steps()"
        return next(rank for rank, each in enumerate(self._membership.members) if each.tag == self.world.tag)

    @property
    def workers(self) -> int:
        """The number of workers."""
        assert self._membership is not None, "the group is formed by steps()"
        return len(self._membership.members)

    @property
    def members(self) -> tuple[str, ...]:
        """The ids of the workers, in the order of their ranks."""
        return () if self._membership is None else tuple(each.id for each in self._membership.members)

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
        self._history.begin(self.session.step)
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
        while not self.stopped and not self._ended and self.session.step >= self._total:
            try:
                if self._history.newest.step < self.session.step:
                    self.session.average_weights()
                self._commit()
                self._ended = True
                with contextlib.suppress(StoreLostError):  # all workers have finished, with or without the store
                    self.world.record_end(self.generation, self.session.step)
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
        try:
            if self._commits.is_due() and self.session.step < self._total and self._commit():
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
        step = self.session.step
        self._history.take(step, self.members)
        rows = self.session.gather([step, self._stop, monitor.join_requested, monitor.error is not None])
        steps, stops, joins, failures = zip(*rows, strict=True)
        if set(steps) != {step}:
            raise DisagreementError(
                f"after the same synchronisation, workers are at the steps {list(steps)}. Every worker must call its "
                "optimizer once in each step."
            )
        self._history.commit(self._save_every)
        self.stopped = any(stops)
        return not self.stopped and any(joins + failures)

    def _recovers_from(self, error: BaseException) -> bool:
        """Continue without the workers that were lost, and return True; False for any other error."""
        if not is_loss(self.session, error):
            return False
        after = self._history.newest.step
        logger.warning("a worker was lost after step %d; the run goes on: the others form a new group.", after)
        logger.info("how it was noticed: %s", error)
        self._recover()
        return True

    def _recover(self) -> None:
        """Form the next generation, and continue from the newest commit that all of its members hold."""
        for _ in range(ATTEMPTS):
            self._leave_group()
            membership = self.world.rendezvous.join(self._as_member(), self._is_over)
            if membership is None:
                self._leave_run() if self.leaving else self._end_with_others()
                return
            if self._form_group(membership):
                return
        raise ElasticError(f"no group could be formed in {ATTEMPTS} attempts. Is the network between workers open?")

    def _as_member(self) -> Member:
        history = self._history
        steps = tuple(each.step for each in history.snapshots)
        return Member(self.world.id, self.world.tag, history.generation, steps, history.in_memory)

    def _is_over(self) -> bool:
        ended = None if self.leaving else self.world.ended()
        return self.leaving or (ended is not None and ended[1] >= self._total)

    def _leave_group(self) -> None:
        """Leave the current group, if there is one. After an error, collectives may still be in flight."""
        self.world.monitor.on_death = None
        idle = self._idle and self.session.error is None and not self.session.in_flight
        group = self.session.group
        self.session.abandon()
        leave(0 if idle else self.world.timeout_s, group)
        self._idle = True

    def _leave_run(self) -> None:
        """End the loop on this worker alone, with its newest snapshot."""
        self._leave_group()
        self._history.rewind()
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
        self._ended = True

    def _form_group(self, membership: Membership) -> bool:
        """Form the group of a membership; return whether all members could."""
        self._idle = False
        try:
            self._connect(membership)
        except ElasticError:
            self.world.report_failure(membership)
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            logger.info(
                "the group of attempt %d was not formed, the next attempt follows: %s", membership.attempt, reason
            )
            self.world.report_failure(membership)
            return False
        self._idle = True
        return True

    def _connect(self, membership: Membership) -> None:
        """Connect to the other members, and continue from the step that all of them agree on."""
        world, self._membership = self.world, membership
        check = partial(world.check_forming, membership)
        world.barrier("ready", membership)
        with world.store.cancelled_by(check):
            group = connect(world.store, f"{membership.attempt}/group", self.worker, self.workers)
            regroup(self.session, group, world.timeout_s)
            snapshot = transfer(membership, self.worker, self._history, group, world.timeout_s, check)
        self._history.resume(snapshot, membership.generation, save=self._save_every is not None)
        self._commits.reset()
        world.barrier("resumed", membership)
        world.rendezvous.confirm(membership)
        world.monitor.watch_for_joins(membership.attempt + 1)
        world.monitor.on_death = self.session.cancel_wait
        self._members_log.log(self.members, membership.base)
