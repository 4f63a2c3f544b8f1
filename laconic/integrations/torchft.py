"""torchft under laconic: its lighthouse says who takes part, its manager which rounds count.

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

Before each round there is a quorum, and after it a vote. Who comes in is handed the state of one of the others over the
group itself, as tensors and JSON: torchft's own way of doing it reads pickled objects, and is not used.
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
from torch._C._distributed_c10d import Store
from torch.optim import Optimizer

from laconic.elastic.group import CallOff, connect, gather, leave, lengthen
from laconic.elastic.handing import hand_over
from laconic.elastic.history import History
from laconic.elastic.members import Members, Seat
from laconic.elastic.parts import is_loss, parts_of
from laconic.elastic.snapshot import Committed, Stateful
from laconic.elastic.step import Agreed, Step
from laconic.elastic.store import BoundedStore
from laconic.session.session import Session

logger = logging.getLogger("laconic.torchft")

ATTEMPTS = 100
"""Quorums that lead to no group, one right after the other, before it is given up."""


class Group(torchft.ProcessGroupGloo):  # type: ignore[misc]
    """torchft's gloo group, as an ordinary one: with each quorum it is torch's world, until the next.

    So a replica is one process, which does not call `init_process_group` itself.
    """

    clean = True
    """Whether nothing is under way in it. After a fault there may be, and nobody can wait for its end."""
    _pg: dist.ProcessGroup | None

    def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
        self._bounded = BoundedStore(store)
        try:
            return connect(self._bounded, "laconic", rank, world_size)
        except RuntimeError:
            leave(self.timeout_s)
            raise

    def abort(self, errored: bool = True) -> None:
        """Leave the world of the last quorum, without waiting for anybody."""
        if self._pg is not None:
            leave(0 if self.clean and not errored else self.timeout_s, self._pg)
            self._bounded.close()
        self._pg, self.clean = None, True

    @property
    def timeout_s(self) -> float:
        """How long a collective may take."""
        seconds: float = self._timeout.total_seconds()
        return seconds


class Run:
    """A replica's part in a run under torchft. The manager must be made with a `Group`, and `use_async_quorum=False`.

    `also` are other things with a state that belongs to a step. `on_commit` is called with each round that counts.
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
                f"use_async_quorum={manager._use_async_quorum})): the workers of a round must be known when it begins, "
                "as an ordinary group. Make it with torchft.Manager(pg=ft.Group(), use_async_quorum=False, ...)."
            )
        if dist.is_initialized():
            raise RuntimeError(
                "Run: torch.distributed is initialised already, and under torchft it is made anew with each quorum. "
                "Leave out init_process_group: a replica is one process."
            )
        self.manager, self.session = manager, session
        self._group: Group = manager._pg
        self._model = model
        self._history = History({**parts_of(session, model, optimizer, also), "torchft": manager}, None, on_commit)
        self._agreed = Agreed(session)
        self._world: dist.ProcessGroup | None = None
        self._total = 0

    @property
    def worker(self) -> int:
        """The index of this replica among those of now. It can change with them."""
        return self._ordinary.rank()

    @property
    def workers(self) -> int:
        """How many replicas there are now."""
        return self._ordinary.size()

    @property
    def _ordinary(self) -> dist.ProcessGroup:
        found: dist.ProcessGroup = self._group.parent
        return found

    def steps(self, total: int) -> Iterator[Step]:
        """Go on to step `total`. Each step is to be entered, and to call the optimizer once."""
        self._total = total
        self._history.begin(self.session.step)
        self._meet()
        while self.session.step < total:
            yield Step(self, self.session.step + 1)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session._levels.abandon()
        self._group.abort(errored=False)
        self.session.detach()

    def _end_step(self, error: BaseException | None) -> bool:
        """Let the round count, if it was one and all of it came through; else go back to the last that did."""
        if error is not None and not is_loss(self.session, error):
            return False
        try:
            if error is not None:
                raise error
            if self._completes_a_round():
                self._vote()
            return False
        except RuntimeError as lost:
            if not is_loss(self.session, lost):
                raise
            self._give_up(lost)
            self._meet()
            return True

    def _completes_a_round(self) -> bool:
        """Whether all have agreed by this step. The last one is made to, whatever the schedule."""
        if self.session.step < self._total:
            return self._agreed.after_step()
        self.session.average_weights()
        return True

    def _vote(self) -> None:
        if self.manager.should_commit():
            self._history.keep(self.session.step, tuple(map(str, range(self.workers))))
            self._history.settle()
        else:  # too few replicas
            self._world = None
        if self._world is None or self.session.step < self._total:
            self._meet()

    def _give_up(self, error: Exception) -> None:
        """Tell the manager, which votes against the round: the next quorum makes a new group."""
        logger.warning("after step %d: %s", self._history.newest.step, error)
        self.manager.report_error(error)
        self.manager.should_commit()
        self._world, self._group.clean = None, False

    def _meet(self) -> None:
        """Hold a quorum, until one has a group to go on with."""
        for _ in range(ATTEMPTS):
            self.manager.start_quorum(allow_heal=False)
            failed: Any = self.manager.errored()
            try:
                if failed is not None:
                    raise RuntimeError(f"no group was formed ({failed.original_exception})")
                if self._world is not self._ordinary:
                    self._take_part(self._ordinary)
                return
            except RuntimeError as error:
                self._give_up(error)
        raise RuntimeError(f"no group could be formed in {ATTEMPTS} quorums. Is the network between replicas open?")

    def _take_part(self, group: dist.ProcessGroup) -> None:
        """Go on in another group, from the newest round that one of it holds."""
        timeout_s, call_off = self._group.timeout_s, _deadline(self._group.timeout_s)
        self.session.regroup(group)
        lengthen(group, timeout_s)
        lengthen(self.session._levels.world.group, timeout_s)
        held = gather(group, [self.manager.current_step(), self._history.newest.step], call_off)
        seats = (Seat(str(worker), "", rounds, (step,)) for worker, (rounds, step) in enumerate(held))
        members = Members(0, 0, tuple(seats))
        snapshot = hand_over(members, self.worker, self._history, group, timeout_s, call_off)
        self._history.adopt(snapshot, generation=1)
        self._agreed.forget()
        for p in self._model.parameters():
            p.grad = None
        self._world = group
        logger.info("%d replicas go on after step %d", self.workers, members.base)


def _deadline(seconds: float) -> CallOff:
    until = time.monotonic() + seconds

    def call_off() -> None:
        if time.monotonic() > until:
            raise RuntimeError(f"a replica did not answer for {seconds:g} s while the group was formed")

    return call_off
