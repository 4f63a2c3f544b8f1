"""Run laconic under torchft: its lighthouse decides who takes part, its manager which steps are committed.

    import torchft
    from laconic.integrations import torchft as ft

    manager = torchft.Manager(ft.Group(), None, None, min_replica_size=2, use_async_quorum=False)
    session = laconic.attach(laconic.diloco(period=100), model, optimizer)     # a bare module, attached as if alone
    with ft.Run(manager, session, model, optimizer) as run:
        for step in run.steps(10_000):
            with step:
                loss(model, batch(step.number, step.worker, step.workers)).backward()
                optimizer.step()
                optimizer.zero_grad()

There is a quorum before each synchronisation, and a vote after it. A replica that joins receives the state of another
over the group, as bytes and JSON. torchft's own transport, which reads pickled objects, is not used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist
import torchft
from torch import nn
from torch.optim import Optimizer

from laconic import Session
from laconic.elastic.group import connect, leave, regroup, transfer
from laconic.elastic.history import Committed, History
from laconic.elastic.rendezvous import Member, Membership
from laconic.elastic.run import CommitClock, Step, is_loss, objects_of
from laconic.elastic.store import BoundedStore, CancelCheck
from laconic.session.session import Stateful
from laconic.torch_private.distributed import Store

logger = logging.getLogger("laconic.torchft")

ATTEMPTS = 100
"""How many quorums may fail to form a group, one after the other, before the run ends."""


class Group(torchft.ProcessGroupGloo):  # type: ignore[misc]
    """torchft's gloo group as torch's default process group, made anew when a quorum changes the replicas.

    So a replica is one process, which does not call `init_process_group` itself.
    """

    idle = True
    """Whether no collective is in flight. After an error there may be one that never ends."""
    _pg: dist.ProcessGroup | None

    def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
        self._store = BoundedStore(store)  # torch's own reference does not keep a Python store alive
        try:
            return connect(self._store, "laconic", rank, world_size)
        except RuntimeError:
            leave(self.timeout_s)
            raise

    def abort(self, errored: bool = True) -> None:
        """Leave the group of the last quorum without waiting for other replicas."""
        if self._pg is not None:
            leave(0 if self.idle and not errored else self.timeout_s, self._pg)
        self._pg, self.idle = None, True

    @property
    def timeout_s(self) -> float:
        """How long a collective may take."""
        seconds: float = self._timeout.total_seconds()
        return seconds


class Run:
    """One replica of a run under torchft. Make the manager with a `Group`, and `use_async_quorum=False`.

    `also` are other objects whose state belongs to a step. `on_commit` is called once with each commit.
    """

    def __init__(
        self,
        manager: torchft.Manager,
        session: Session,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        also: Mapping[str, Stateful] | None = None,
        on_commit: Callable[[Committed], None] | None = None,
    ) -> None:
        if not isinstance(manager._pg, Group) or manager._use_async_quorum:
            raise ValueError(
                f"Run(manager={type(manager).__name__}(pg={type(manager._pg).__name__}, "
                f"use_async_quorum={manager._use_async_quorum})): the replicas must be known before a synchronisation "
                "begins. Make it with torchft.Manager(pg=ft.Group(), use_async_quorum=False, ...)."
            )
        if dist.is_initialized():
            raise RuntimeError(
                "Run: torch.distributed is initialised already, and under torchft each quorum may make it anew. "
                "Leave out init_process_group: a replica is one process."
            )
        session.plan.check_by_steps("Run")
        self.manager, self.session = manager, session
        self._group: Group = manager._pg
        self._history = History(
            {**objects_of(session, model, optimizer, also), "torchft": manager}, on_commit=on_commit
        )
        self._commits = CommitClock(session)
        self._joined: dist.ProcessGroup | None = None
        """The group that the session uses; None if a new one must be formed."""
        self._total = 0

    @property
    def worker(self) -> int:
        """The rank of this replica. It changes when replicas come or go."""
        return self._current_group.rank()

    @property
    def workers(self) -> int:
        """The number of replicas."""
        return self._current_group.size()

    @property
    def _current_group(self) -> dist.ProcessGroup:
        found: dist.ProcessGroup = self._group.parent
        return found

    def steps(self, total: int) -> Iterator[Step]:
        """Iterate over the steps up to `total`. Enter each step with `with`, and call the optimizer once in it."""
        self._total = total
        self._history.begin(self.session.step)
        self._hold_quorum()
        while self.session.step < total:
            yield Step(self.session.step + 1, self.worker, self.workers, self._end_step)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session.abandon()
        self._group.abort(errored=False)
        self.session.detach()

    def _end_step(self, error: BaseException | None) -> bool:
        """Vote on the step if it synchronised all replicas; if one was lost, go back to the last commit.

        Returns whether `error` was handled.
        """
        if error is not None:
            return self._recovers_from(error)
        self._history.check_kept()
        try:
            if self._commit_is_due():
                self._vote()
        except RuntimeError as lost:
            if not self._recovers_from(lost):
                raise
        return False

    def _recovers_from(self, error: BaseException) -> bool:
        """Continue without the replicas that were lost, and return True; False for any other error."""
        if not is_loss(self.session, error):
            return False
        self._history.check_kept()
        self._report(error)
        self._hold_quorum()
        return True

    def _commit_is_due(self) -> bool:
        """Return whether all replicas have synchronised. The last step always synchronises them."""
        if self.session.step < self._total:
            return self._commits.is_due()
        self.session.average_weights()
        return True

    def _vote(self) -> None:
        if self.manager.should_commit():
            self._history.take(self.session.step, tuple(map(str, range(self.workers))))
            self._history.commit()
        else:  # too few replicas
            self._joined = None
        if self._joined is None or self.session.step < self._total:
            self._hold_quorum()

    def _report(self, error: BaseException) -> None:
        """Report an error to the manager, which votes against the step. The next quorum forms a new group."""
        logger.warning("after step %d: %s", self._history.newest.step, error)
        self.manager.report_error(error)
        self.manager.should_commit()
        self._joined, self._group.idle = None, False

    def _hold_quorum(self) -> None:
        """Hold quorums until one has a group to continue in."""
        for _ in range(ATTEMPTS):
            self.manager.start_quorum(allow_heal=False)
            failed: Any = self.manager.errored()
            try:
                if failed is not None:
                    raise RuntimeError(f"no group was formed ({failed.original_exception})")
                if self._joined is not self._current_group:
                    self._join(self._current_group)
                return
            except RuntimeError as error:
                self._report(error)
        raise RuntimeError(f"no group could be formed in {ATTEMPTS} quorums. Is the network between replicas open?")

    def _join(self, group: dist.ProcessGroup) -> None:
        """Continue in another group, from the newest commit that one of its replicas holds."""
        timeout_s = self._group.timeout_s
        regroup(self.session, group, timeout_s)
        held = self.session.gather([self.manager.current_step(), self._history.newest.step])
        members = (Member(str(rank), "", commits, (step,)) for rank, (commits, step) in enumerate(held))
        membership = Membership(0, 0, tuple(members))
        snapshot = transfer(membership, self.worker, self._history, group, timeout_s, _deadline(timeout_s))
        self._history.resume(snapshot, generation=1)
        self._commits.reset()
        self._joined = group
        logger.info("%d replicas continue after step %d", self.workers, membership.base)


def _deadline(seconds: float) -> CancelCheck:
    until = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > until:
            raise RuntimeError(f"a replica did not answer for {seconds:g} s while the group was formed")

    return check
