"""The training loop of an elastic run: commits rounds, and takes a worker from one generation to the next.

    for step in run.steps(1000):
        with step:
            loss(model, batch(step.number, step.worker, step.workers)).backward()
            optimizer.step()
            optimizer.zero_grad()

After each round that all agree on, state is copied to host memory, and workers exchange four numbers: only then is the
round committed. Workers that lose one of them can differ by one round, so the last two copies are kept. Whoever passes
that exchange knows that all others have the same round in memory: so it can never be lost while one of them lives.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from laconic.checks.agreement import DisagreementError
from laconic.checks.agreement import _gather as gather_rows
from laconic.elastic.errors import ElasticError, EndedError, ReplacedError, StoreLostError
from laconic.elastic.group import CallOff, called_off, connect, gather, leave, lengthen
from laconic.elastic.handing import hand_over
from laconic.elastic.history import History, Shelf
from laconic.elastic.members import Members, Seat
from laconic.elastic.parts import check_counts, is_loss, parts_of
from laconic.elastic.snapshot import Committed, Stateful
from laconic.elastic.step import Agreed, Step
from laconic.elastic.world import World
from laconic.session.session import Session

logger = logging.getLogger("laconic.elastic")

ATTEMPTS = 100
"""Groups that fail to form, one right after the other, before it is given up."""


class Run:
    """A worker's part in a run whose workers may come and go.

    `also` are other things with a state that belongs to a step, such as a learning rate scheduler. Every `every`-th
    round that workers agree on is committed. With a `folder`, every worker saves its own state there when it ends or
    leaves, and every `save_every` commits; a run that is started again goes on from there. `on_commit` is called with
    each round, once it is certain.
    """

    def __init__(
        self,
        world: World,
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
        check_counts(every=every, save_every=save_every)
        self.world, self.session = world, session
        self._model = model
        self._every, self._save_every = every, save_every
        shelf = None if folder is None else Shelf(Path(folder), world.id)
        self._history = History(parts_of(session, model, optimizer, also), shelf, on_commit)
        self._members: Members | None = None
        self._weight_sync = 0
        self._stop = self._leaving = self._ended = False
        self._total = 0
        self._clean = True
        self._agreed = Agreed(session)
        self.stopped = False
        """Whether the loop has ended early, because a worker called `stop`, or this one `leave`."""

    @property
    def worker(self) -> int:
        """The index of this worker among those of now. It can change with them."""
        assert self._members is not None, "the group is formed by steps()"
        return next(i for i, seat in enumerate(self._members.seats) if seat.tag == self.world.tag)

    @property
    def workers(self) -> int:
        """How many workers there are now."""
        assert self._members is not None, "the group is formed by steps()"
        return len(self._members.seats)

    @property
    def members(self) -> tuple[str, ...]:
        """The ids of the workers of now, in their order."""
        return () if self._members is None else tuple(seat.id for seat in self._members.seats)

    def stop(self) -> None:
        """Let all workers end the loop together, after the next committed round. Safe in a signal handler."""
        self._stop = True

    def leave(self) -> None:
        """Let this worker end its loop after the step under way, and the others go on. Safe in a signal handler."""
        self._leaving = True

    def leave_on(self, *signals: signal.Signals) -> None:
        """Leave when one of these signals comes, by default SIGTERM: what torchrun sends before it starts us again."""
        for each in signals or (signal.SIGTERM,):
            signal.signal(each, lambda *_: self.leave())

    def steps(self, total: int) -> Iterator[Step]:
        """Go on to step `total`. Each step is to be entered, and to call the optimizer once.

        Forms the group first: waits for the other workers, and takes over where they are. At the end weights that local
        steps have driven apart are averaged. Ends early after `stop`, on all workers alike, or `leave`, on this one.
        """
        self._begin(total)
        while not self._finished():
            yield Step(self, self.session.step + 1)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if not isinstance(self.world.watch.failed, ReplacedError):  # the folder is the other's now
            self._history.save()
        self.session.detach()
        self.world.leave()

    def _begin(self, total: int) -> None:
        self._total, self._ended = total, False
        self._history.begin(self.session.step)
        self._recover()

    def _finished(self) -> bool:
        """Whether the loop is over. The last step is committed whatever the schedule, and the end is noted."""
        if self._is_leaving() and not (self.stopped or self._ended):
            self._depart()
        while not self.stopped and not self._ended and self.session.step >= self._total:
            try:
                if self._history.newest.step < self.session.step:
                    self.session.average_weights()
                self._commit()
                self._ended = True
                with contextlib.suppress(StoreLostError):  # all have come to the end, whoever hears of it
                    self.world.end(self._history.generation, self.session.step)
            except RuntimeError as error:
                if not self._survives(error):
                    raise
        return self.stopped or self._ended

    def _end_step(self, error: BaseException | None) -> bool:
        """Commit what the step agreed on; after a fault, go back to the last committed round."""
        if error is not None:
            return self._survives(error)
        try:
            if self._agreed.after_step():
                self._weight_sync += 1
                if self._weight_sync % self._every == 0 and self.session.step < self._total and self._commit():
                    self._recover()
        except RuntimeError as lost:
            if not self._survives(lost):
                raise
        return False

    def _commit(self) -> bool:
        """Keep this step, and hear that all others have: then it is committed.

        Tells whether to meet again: somebody wants to come in, or has lost the store, and will find so at the meeting.
        """
        watch = self.world.watch
        if isinstance(watch.failed, ReplacedError):
            raise watch.failed
        step = self.session.step
        self._history.keep(step, self.members)
        row = [step, int(self._stop), int(watch.wanted), int(watch.failed is not None)]
        rows = gather_rows(self.session._levels.world, torch.tensor(row))
        if bool((rows[:, 0] != step).any()):
            raise DisagreementError(
                f"after the same round, workers are at the steps {rows[:, 0].tolist()}. Every worker must call its "
                "optimizer once in each step."
            )
        self._history.settle(self._save_every)
        self.stopped = bool(rows[:, 1].any())
        return not self.stopped and bool(rows[:, 2:].any())

    def _survives(self, error: BaseException) -> bool:
        """After the loss of a worker, go on with the others, and say so. Other errors are the caller's."""
        if not is_loss(self.session, error):
            return False
        logger.warning("after step %d: %s", self._history.newest.step, error)
        self._recover()
        return True

    def _recover(self) -> None:
        """Meet, form the next generation, and go on from the newest round that all hold."""
        for _ in range(ATTEMPTS):
            self._leave()
            members = self.world.meetings.meet(self._seat(), self._is_over)
            if members is None:
                self._depart() if self._leaving else self._follow_to_the_end()
                return
            if self._forms(members):
                return
        raise ElasticError(f"no group could be formed in {ATTEMPTS} meetings. Is the network between workers open?")

    def _leave(self) -> None:
        """Leave the group that there was. Where a collective failed, others may be under way still."""
        self.world.watch.on_silence = None
        levels = self.session._levels
        clean = self._clean and levels.world.broken is None and not self.session._weight_sync.waiting
        levels.abandon()
        leave(0 if clean else self.world.timeout_s, levels)
        self._clean = True

    def _seat(self) -> Seat:
        steps = tuple(snapshot.step for snapshot in self._history.snapshots)
        return Seat(self.world.id, self.world.tag, self._history.generation, steps, self._history.in_memory)

    def _depart(self) -> None:
        """End the loop of this worker alone, with the last round that it holds."""
        self._leave()
        self._history.back()
        self.stopped = True

    def _is_leaving(self) -> bool:
        self._leaving |= self.world.orphaned
        return self._leaving

    def _is_over(self) -> bool:
        if self._is_leaving():
            return True
        ended = self.world.ended()
        return ended is not None and ended[1] >= self._total

    def _follow_to_the_end(self) -> None:
        history = self._history
        if self.world.ended() != (history.generation, history.newest.step):
            raise EndedError(
                f"the run has come to its end, step {self._total}, without worker {self.world.id!r}: the others hold "
                "its result. For a run of its own, join with another run= or store."
            )
        history.adopt(history.newest, history.generation)
        self._ended = True

    def _forms(self, members: Members) -> bool:
        """Form a group with the other members, and take the round that it goes on from."""
        self._clean = False
        try:
            self._form(members, self.world.caller_off(members))
        except ElasticError:
            self.world.fail(members)
            raise
        except RuntimeError as error:
            logger.warning("meeting %d: %s", members.attempt, str(error).partition("\n")[0])
            self.world.fail(members)
            return False
        self._clean = True
        return True

    def _form(self, members: Members, call_off: CallOff) -> None:
        world = self.world
        self._members = members
        world.get_ready(members, call_off)
        with called_off(world.store, call_off):
            group = connect(world.store, f"{world.prefix_of(members)}/group", self.worker, self.workers)
            self.session.regroup(group)
            lengthen(group, world.timeout_s)
            lengthen(self.session._levels.world.group, world.timeout_s)
            self._adopt(members, group, call_off)
        gather(group, [members.generation], call_off)
        world.meetings.confirmed(members)
        world.watch.look_for_seats(members.attempt + 1)
        timeout = self.session._levels.world.timeout
        world.watch.on_silence = None if timeout is None else timeout.give_up
        logger.info("generation %d goes on after step %d: %s", members.generation, members.base, self.members)

    def _adopt(self, members: Members, group: dist.ProcessGroup, call_off: CallOff) -> None:
        """Go to the round that the members go on from: back, or to that of another."""
        snapshot = hand_over(members, self.worker, self._history, group, self.world.timeout_s, call_off)
        self._history.adopt(snapshot, members.generation, save=self._save_every is not None)
        for p in self._model.parameters():
            p.grad = None
        self._weight_sync = 0  # counted alike by those who were there and those who come
        self._agreed.forget()
