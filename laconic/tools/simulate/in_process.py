"""Workers as threads of one process: each waits at a collective for the others, and the last to arrive serves all.

Sessions run unchanged on an `InProcessGroup`: their queues pass exchanges to an `InProcessWorld`, where all workers'
exchanges advance in lockstep, with the bits of gloo's collectives. A few threads compute at a time; the others wait for
their turn.

gloo sums an all_reduce in a ring. The tensor is cut into one chunk for each worker. Chunk c starts at worker c-1 and
goes down the ranks, and each worker adds its own part: c-2, c-3, and so on, to worker c, which then has the sum. So the
order of a sum, and with it the last bit, depends on where in the tensor a number is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from laconic.comm.collectives import mean_in_blocks, shards_of, sums_exactly
from laconic.comm.groups import GroupWithQueue
from laconic.comm.lockstep import in_turn, lockstep
from laconic.comm.queue import Agree, CollectiveQueue, Running
from laconic.errors import LostWorkerError, names
from laconic.exchange import Decide, Exchange, Mean, Peers, Request, intercept, operation, payload_bytes
from laconic.ledger import Ledger

SEGMENT_BYTES = 1 << 20
"""The largest message of gloo's ring: the bounds of chunks are multiples of messages."""

Members: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Collective:
    """One collective of a flush."""

    op: str
    payload_bytes: int
    phase: str
    step: int


Served: TypeAlias = Callable[[Members, list[Collective]], None]


@dataclass(eq=False)
class _Flush:
    """The exchanges of the workers that have arrived, and how often all have."""

    arrived: dict[int, Exchange[Any]] = field(default_factory=dict)
    sent: list[Collective] = field(default_factory=list)
    rounds: int = 0


class InProcessWorld:
    """Where the threads of a run wait for each other.

    `at_once` is how many threads may compute at a time. `served` is called with all collectives.
    """

    def __init__(self, workers: int, at_once: int, served: Served | None = None) -> None:
        self.workers = workers
        self.error: BaseException | None = None
        """The error that has ended the run."""
        self._served = served
        self._turns = threading.Semaphore(at_once)
        self._changed = threading.Condition()
        self._flushes: dict[Members, _Flush] = {}
        self._barriers = [0] * workers
        self._lost: set[int] = set()

    def group(self, worker: int, members: Sequence[int] | None = None) -> InProcessGroup:
        """Make the group of a worker, of all workers or of some."""
        return InProcessGroup(self, worker, tuple(range(self.workers) if members is None else members))

    @property
    def alive(self) -> Members:
        """The workers that were not lost."""
        with self._changed:
            return tuple(worker for worker in range(self.workers) if worker not in self._lost)

    @contextmanager
    def working(self, worker: int) -> Iterator[None]:
        """Compute as a worker. An error ends the run for all."""
        self._turns.acquire()
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._turns.release()
            with self._changed:
                self._changed.notify_all()

    def lose(self, worker: int) -> None:
        """Take a worker out: flushes that it is missing from raise `LostWorkerError`."""
        with self._changed:
            self._lost.add(worker)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End the run: every flush raises."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def run_together(self, members: Members, worker: int, exchange: Exchange[Any], sent: list[Collective]) -> None:
        """Wait for the other members, and run the exchanges of all. `sent` grows while they run."""
        with self._changed:
            flush = self._flushes.setdefault(members, _Flush())
            flush.arrived[worker], now = exchange, flush.rounds
            flush.sent = sent
            last = len(flush.arrived) == len(members)
        if last:
            self._serve(members, flush)
        self._wait(lambda: flush.rounds > now, members, worker)

    def barrier(self, worker: int) -> None:
        """Wait for all workers that were not lost, also for those that are lost meanwhile."""
        with self._changed:
            self._barriers[worker] += 1
            mine = self._barriers[worker]
        self._wait(
            lambda: all(self._barriers[each] >= mine for each in range(self.workers) if each not in self._lost),
            (),
            worker,
        )

    def _serve(self, members: Members, flush: _Flush) -> None:
        with torch.no_grad():
            lockstep([flush.arrived[each] for each in members], mean=gloo_mean)
        if self._served is not None and flush.sent:
            self._served(members, flush.sent)
        with self._changed:
            flush.arrived = {}
            flush.rounds += 1
            self._changed.notify_all()

    def _wait(self, over: Callable[[], bool], members: Members, worker: int) -> None:
        """Let others compute until the flush is over, and until it is this worker's turn again."""
        self._turns.release()
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self.error is not None or over() or (not over() and self._lost.intersection(members))
            )
            missing = [] if over() else sorted(self._lost.intersection(members))
        self._turns.acquire()
        if self.error is not None:
            raise RuntimeError("another worker of this simulation has failed.") from self.error
        if missing:
            raise LostWorkerError(f"{names(missing)} was lost.", missing)


class InProcessGroup(GroupWithQueue):
    """Some workers of one process, as seen by one of them."""

    def __init__(self, world: InProcessWorld, worker: int, members: Members) -> None:
        super().__init__(members.index(worker), len(members))
        self.world, self.worker, self.members = world, worker, members

    def part(self, size: int) -> InProcessGroup:
        """Return the group of `size` consecutive workers that this one is in."""
        first = self.rank() // size * size
        return InProcessGroup(self.world, self.worker, self.members[first : first + size])

    def queue(self, ledger: Ledger, level: str) -> InProcessQueue:
        """Return a queue of this worker."""
        return InProcessQueue(self, ledger, level)


class InProcessQueue(CollectiveQueue):
    """The queue of one worker: what is submitted runs at the flush, together with what the others submit."""

    def __init__(self, group: InProcessGroup, ledger: Ledger, level: str) -> None:
        super().__init__(None, ledger, level)
        self.group, self._place = group, group
        self.peers = Peers(group.rank(), group.size())
        self._submitted: list[Running] = []

    def enqueue(self, started: Sequence[Running]) -> None:
        """Keep exchanges for the flush."""
        self._submitted += started

    def flush(self, void: bool = False, waits: bool = True, agree: Agree | None = None) -> None:
        """Run all that was submitted, and wait for it. Replicas are whole here: there is nobody else to `agree`."""
        running, self._submitted = self._submitted, []
        if not running:
            return
        sent: list[Collective] = []
        exchanges = [self._recorded(each, sent) for each in running]
        place = self._place
        try:
            place.world.run_together(place.members, place.worker, in_turn(exchanges), sent)
        except BaseException as error:
            self.broken = error
            for each in running:
                each.batch.fail(error)
            if not all(each.batch.quiet for each in running):
                raise

    def _recorded(self, running: Running, sent: list[Collective]) -> Exchange[Any]:
        """Run an exchange, record its collectives, and complete the futures of its caller."""

        def see(request: Request | Decide) -> Exchange[Tensor]:
            answer = yield request
            if not isinstance(request, Decide) and self.peers.size > 1:
                running.request, running.launched_s = request, time.perf_counter()
                running.round += 1
                running.record(self.ledger, self.peers, self.level)
                sent.append(Collective(operation(request), payload_bytes(request), running.phase, running.step))
            return answer

        running.result, running.ended = (yield from intercept(running.exchange, see)), True
        running.batch.one_ended()
        return running.result


# The bits of gloo.


def gloo_mean(requests: Sequence[Mean]) -> Tensor:
    """Return the mean that `collectives.launch` computes on a gloo group of as many workers."""
    rows = [request.x.contiguous().view(-1) for request in requests]
    workers, like = len(rows), requests[0].x
    if workers == 1:
        return like
    shares = requests[0].shares
    if shares is not None or (requests[0].wide and not sums_exactly(like.dtype, workers)):
        return _sharded_mean(rows, shares).view(like.shape)
    return ring_sum([row.div_(workers) for row in rows]).view(like.shape)


def ring_sum(rows: Sequence[Tensor]) -> Tensor:
    """Sum flat tensors, one of each worker, in the order of gloo's ring.

    >>> ring_sum([torch.tensor([1e8, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([-1e8, 1.0])]).tolist()
    [0.0, 3.0]
    """
    workers, total = len(rows), torch.empty_like(rows[0])
    chunk = _chunk(rows[0].nbytes, rows[0].element_size(), workers)
    for first in range(0, len(total), chunk):
        owner, part = first // chunk, slice(first, first + chunk)
        into = total[part].copy_(rows[owner - 1][part])
        for rank in range(owner - 2, owner - workers - 1, -1):
            into += rows[rank % workers][part]
    return total


def _chunk(size_bytes: int, element_bytes: int, workers: int) -> int:
    """Return the elements of a worker's chunk: at least two messages, as many on each worker."""
    largest = element_bytes * max(1, SEGMENT_BYTES // element_bytes)
    messages = max(-(-size_bytes // largest), 2 * workers)
    each = -(-messages // workers)
    message_bytes = -(-size_bytes // (each * workers))
    return each * -(-message_bytes // element_bytes)


def _sharded_mean(rows: Sequence[Tensor], shares: Sequence[float] | None) -> Tensor:
    result, first = torch.empty_like(rows[0]), 0
    for size in shards_of(len(result), len(rows)):
        part = slice(first, first + size)
        mean_in_blocks([row[part] for row in rows], result[part], shares)
        first += size
    return result
