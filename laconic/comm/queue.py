"""One ordered queue of collectives for each process group.

Collectives of a group must start in the same order on every worker, but backward passes and threads have no common
clock. One thread launches all of them, by a rule that depends only on the order in which exchanges were submitted:

    a new exchange launches its first collective; then each older one, oldest first, waits for its result and launches
    its next.

For three buckets of two collectives each:  1a 2a 1b 3a 2b | flush: 3b.

An exchange that asks `Decide` is held. After the flush, when all have asked or ended, all get one answer: whether all
results are finite. So a step in which one bucket holds NaN changes the state of none.

The queue has a process group of its own, so that no other collective (DDP's bitmap of unused parameters, the user's
own) can come between. NCCL orders by stream and its waits do not block the host: there, exchanges run in the caller's
thread, on the caller's group.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias

import torch
from torch import Tensor
from torch.futures import Future

from laconic.comm.collectives import Group, launch
from laconic.comm.timeout import CollectiveTimeout
from laconic.exchange import (
    Averaged,
    Decide,
    Done,
    Exchange,
    First,
    Peers,
    Request,
    T,
    advance,
    all_true,
    gather,
    largest,
    operation,
    own_bytes,
    payload_bytes,
)
from laconic.ledger import Ledger
from laconic.torch_private.distributed import destroy_group, ordered_by_stream, second_group


@dataclass(eq=False)
class Batch:
    """Exchanges that were submitted together: the futures get their values when the last of them has ended."""

    values: list[Tensor]
    futures: list[Future[Tensor]]
    running: int
    quiet: bool = False

    def one_ended(self) -> None:
        """Count an exchange that has ended."""
        self.running -= 1
        if self.running == 0:
            for future, value in zip(self.futures, self.values, strict=True):
                if not future.done():
                    future.set_result(value)

    def fail(self, error: BaseException) -> None:
        """End all of them with an error."""
        if self.quiet:
            self.running = 1
            self.one_ended()
        for future in self.futures:
            if not future.done():
                # torch's Future accepts any exception, whatever its annotation says.
                future.set_exception(error)  # type: ignore[arg-type]


@dataclass(eq=False)
class Running:
    """An exchange, the request that is being served, and the collective in flight for it."""

    exchange: Exchange[Any]
    batch: Batch
    phase: str
    step: int
    ended: bool = False
    result: Any = None
    round: int = 0
    request: Request | None = None
    collectives: Generator[Any, None, Tensor] | None = None
    work: Any = None
    launched_s: float = 0.0
    held: Tensor | None = None
    """What it has asked `Decide` with: it waits for the flush, and launches nothing more."""
    answer: Tensor | None = None
    """The answer to `Decide`, to be sent next."""

    def record(self, ledger: Ledger, peers: Peers, level: str) -> None:
        """Write the collective that has ended to the ledger."""
        assert self.request is not None
        distance = (peers.rank - self.request.worker) % peers.size if isinstance(self.request, First) else 0
        ledger.record(
            operation(self.request),
            payload_bytes(self.request),
            peers.size,
            phase=self.phase,
            level=level,
            round_=self.round,
            step=self.step,
            seconds=time.perf_counter() - self.launched_s,
            distance=distance,
            own=own_bytes(self.request, peers.rank),
        )


@dataclass(frozen=True, eq=False)
class Pending(Generic[T]):
    """An exchange that was started, and whose result is waited for later."""

    running: Running
    future: Future[Tensor]

    def wait(self) -> T:
        """Return its result. The queue must have been flushed."""
        self.future.wait()
        result: T = self.running.result
        return result


@dataclass(frozen=True)
class Flush:
    """Queued after the last exchange of a batch: run all of them to their end; if `void`, none keeps its state.

    `since_s` is when the caller began to wait for it; None if it goes on meanwhile. `agree` is asked before `Decide` is
    answered.
    """

    void: bool
    since_s: float | None
    agree: Agree | None = None


@dataclass(frozen=True)
class EndThread:
    """Ends the thread."""


KEPT_BYTES = (32 << 20) - (1 << 16)
"""The largest block from which glibc learns how much freed memory to keep for the next allocation: twice as much."""

Agree: TypeAlias = Callable[[Tensor], Tensor]
"""Whether a batch is finite on other workers, too, that average other tensors of the same step: a 0-d tensor of one."""
Items: TypeAlias = "queue.SimpleQueue[Running | Flush | EndThread]"
"""What the thread of a queue is given, in order."""


class CollectiveQueue:
    """Runs the exchanges of one group, and fixes the order of its collectives.

    `group=None` is a world of one: every request is served by its own tensor. With `share` it runs on `group` itself,
    for callers that wait for each batch and start no other collective meanwhile. `device` is where the tensors are
    that it averages: a group may have one backend for the CPU and another for CUDA.
    """

    def __init__(
        self,
        group: Group | None,
        ledger: Ledger,
        level: str = "world",
        share: bool = False,
        timeout_s: float | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.ledger = ledger
        self.level = level
        self.group = group
        self.peers = Peers(0, 1) if group is None else Peers(group.rank(), group.size())
        by_stream = group is not None and ordered_by_stream(group, device)
        self.device = torch.device("cuda" if by_stream else "cpu")
        """Where small tensors of our own must be: headers, digests."""
        self._inline = self.workers == 1 or by_stream
        self.timeout: CollectiveTimeout | None = None
        self._made: Group | None = None
        if group is not None and not self._inline and not share:
            self.group = self._made = second_group(group)
            self.timeout = CollectiveTimeout(self.group, timeout_s)
        self.broken: BaseException | None = None
        """The error that ended a collective. The order is lost then: nothing more can run."""
        self._items: Items = queue.SimpleQueue()
        self._active: list[Running] = []
        self._ended: list[Callable[[], Tensor]] = []
        """Of the exchanges that have ended since the last flush without asking `Decide`: whether they are finite."""
        self._thread: threading.Thread | None = None
        self._stop: weakref.finalize[..., CollectiveQueue] | None = None
        self._own_stream = OwnStream()

    @property
    def workers(self) -> int:
        """How many workers the group has."""
        return self.peers.size

    def submit(self, exchange: Exchange[Any], phase: str, value: Tensor) -> Future[Tensor]:
        """Queue an exchange; when it ends, the future's value is `value`.

        All workers must submit the same exchanges in the same order, and `flush` after the last of a batch.
        """
        future = new_future(value)
        self.submit_all([exchange], phase, [value], [future])
        return future

    def submit_all(
        self,
        exchanges: Sequence[Exchange[Any]],
        phase: str,
        values: Sequence[Tensor],
        futures: Sequence[Future[Tensor]],
        quiet: bool = False,
    ) -> list[Running]:
        """Queue exchanges; when all have ended, the futures get `values`.

        With `quiet` they do so after an error, too: the caller looks at `broken` before it uses the values.
        """
        batch = Batch(list(values), list(futures), len(exchanges), quiet)
        started = [Running(exchange, batch, phase, self.ledger.step) for exchange in exchanges]
        if self.broken is None:
            self.enqueue(started)
        else:
            batch.fail(self.broken)
        return started

    def enqueue(self, started: Sequence[Running]) -> None:
        """Hand exchanges to the thread, or run them at once where streams define the order."""
        for running in started:
            if self._inline:
                self._run_inline(running)
            else:
                if self._thread is None:
                    self._start_thread()
                self._items.put(running)

    def flush(self, void: bool = False, waits: bool = True, agree: Agree | None = None) -> None:
        """Run all submitted exchanges to their end, without waiting for it; `waits` tells whether the caller will.

        If `void`, none keeps its state: of a backward that failed, whose other exchanges will never be submitted.
        """
        if not self._inline:
            self._items.put(Flush(void, time.perf_counter() if waits else None, agree))
            return
        with torch.no_grad(), self._own_stream.of(self._active):
            self._finish(void, agree)

    def start(self, exchange: Exchange[T], phase: str) -> Pending[T]:
        """Queue an exchange whose result is waited for later, after a flush."""
        future = new_future(torch.empty(0))
        (running,) = self.submit_all([exchange], phase, [torch.empty(0)], [future])
        return Pending(running, future)

    def run(self, exchange: Exchange[T], phase: str) -> T:
        """Run one exchange to its end, wait for it, and return its result."""
        started = self.start(exchange, phase)
        self._flush_and_wait(started.future)
        return started.wait()

    def run_all(self, exchanges: Iterable[Exchange[Any]], phase: str, agree: Agree | None = None) -> None:
        """Run exchanges together, and wait for all of them. What they return is dropped, each when it ends."""
        started = list(exchanges)
        if started:
            nothing, future = torch.empty(0), new_future(torch.empty(0))
            self.submit_all(started, phase, [nothing], [future])
            self._flush_and_wait(future, agree)

    def _flush_and_wait(self, future: Future[Tensor], agree: Agree | None = None) -> None:
        self.flush(agree=agree)
        try:
            wait_for(future)
        except BaseException:
            if not future.done():  # a signal: this worker does not know how far the others are
                self.broken = RuntimeError(
                    "a signal has interrupted this worker's wait for the others: nothing more can be synchronised. "
                    "Save this worker's state if it is of use, and end the process."
                )
            raise

    def gather(self, x: Tensor) -> Tensor:
        """Gather `x` from every worker, on the host: [workers, *x.shape]. Every worker calls it and waits."""
        return x.cpu()[None] if self.workers == 1 else self.run(gather(x.to(self.device)), "control")

    def largest(self, x: Tensor) -> Tensor:
        """Return the largest of every worker's `x` by element, on the host. Every worker calls it and waits."""
        return x.cpu() if self.workers == 1 else self.run(largest(x.to(self.device)), "control")

    def close(self) -> None:
        """End the thread when all exchanges have ended, and destroy the group that was made for this queue.

        A group in which a collective failed, or has not ended, stays: to destroy it would wait for that collective.
        """
        made, self._made = self._made, None
        if self._stop is not None and self._thread is not None:
            self._stop.detach()
            if not end_thread(self._items, self._thread):
                made = None
        self._stop = self._thread = None
        if made is not None and self.broken is None:
            self.group = None
            self.broken = RuntimeError("this session is detached, and its process group is destroyed. Attach again.")
            destroy_group(made)

    def leave(self) -> None:
        """End the thread after what is queued, soon also if it waits for another worker."""
        if self._stop is not None:
            self._stop()

    def abandon(self) -> None:
        """Leave the collectives in flight behind, for peers that cannot answer any more."""
        self._made = None
        if self.timeout is not None:
            self.timeout.cancel()
        self.close()

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=_serve, args=(weakref.ref(self), self._items), daemon=True)
        self._thread.name = f"laconic-collectives-{self.level}"
        self._thread.start()
        # Also at the interpreter's exit, for loops that never detach: a thread that outlives it aborts the process.
        self._stop = weakref.finalize(self, leave_thread, self._items, self._thread, self.timeout)

    def _run_inline(self, running: Running) -> None:
        self._active.append(running)
        try:
            with torch.no_grad(), self._own_stream.of([running]):
                while not running.ended and running.held is None:
                    self._advance_all([running])
        except BaseException:  # the user's Ctrl-C: no exchange of this step goes on
            self._active.clear()
            raise

    def _serve_item(self, item: Running | Flush) -> None:
        if isinstance(item, Flush):
            self._finish(item.void, item.agree)
            if item.since_s is not None:
                self.ledger.add_wait(item.since_s)
        elif self.broken is not None:
            item.batch.fail(self.broken)
        else:  # the rule of order: the new exchange first, then each older one, oldest first
            older, self._active = self._active, [*self._active, item]
            self._advance_all([item, *older])

    def _finish(self, void: bool, agree: Agree | None) -> None:
        """Run all exchanges to their end; those that ask `Decide` get one answer, when all have asked or ended."""
        while self._active:  # until all have ended; one that asks `Decide` is passed over until all others have, too
            try:
                if all(running.held is not None for running in self._active):
                    decide(self._active, self._ended, void, agree)
            except Exception as error:
                self._fail(error)
            self._advance_all(self._active)
        self._ended.clear()

    def _advance_all(self, some: Sequence[Running]) -> None:
        for running in list(some):
            self._advance(running)
        self._active = [running for running in self._active if not running.ended]

    def _advance(self, running: Running) -> None:
        """Wait for the collective in flight, pass its result on, and launch the next."""
        if running.ended or running.held is not None:
            return
        try:
            if running.work is not None:
                self._wait(running)
            self._launch_next(running)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End all exchanges: after an error, the order of the group's collectives is lost."""
        self.broken = error
        for each in self._active:
            each.ended = True
            each.batch.fail(error)

    def _launch_next(self, running: Running) -> None:
        while True:
            # 1. The next collective of the request that is being served (a wide mean has two), or its result.
            answer, running.answer = running.answer, None
            if running.collectives is not None:
                try:
                    running.work = next(running.collectives)
                    return
                except StopIteration as stop:
                    answer = stop.value
                if running.work is not None:  # a single worker sends nothing
                    running.record(self.ledger, self.peers, self.level)
            # 2. The exchange computes until its next request, its end, or `Decide`, which waits for the flush.
            request = advance(running.exchange, answer)
            if isinstance(request, Done):
                self._end(running, request.result)
                return
            if isinstance(request, Decide):
                running.held, running.work, running.collectives = request.ok, None, None
                return
            # 3. The collectives of a new request: the loop launches the first.
            running.request = request
            running.round += 1
            running.launched_s = time.perf_counter()
            running.work, running.collectives = None, launch(request, self.group)

    def _end(self, running: Running, result: Any) -> None:
        running.result, running.ended = result, True
        if isinstance(result, Averaged) and not result.decided:
            self._ended.append(result.finite)
        running.batch.one_ended()

    def _wait(self, running: Running) -> None:
        if self.timeout is None:
            running.work.wait()
        else:
            what = f"step {running.step}, {running.phase} among {self.workers} workers ({self.level})"
            self.timeout.wait(running.work, what)


def _serve(collectives: weakref.ref[CollectiveQueue], items: Items) -> None:
    """Serve the queue. It holds no reference while it waits, so that an unused queue can be collected."""
    # In a new thread, matrix products use all cores until something else has read `torch.set_num_threads`.
    torch.get_num_threads()
    # glibc gives freed memory back, and takes it again page by page, until it has freed a block as large as this.
    torch.empty(KEPT_BYTES, dtype=torch.uint8)
    with torch.no_grad():
        while True:
            try:
                item = items.get(timeout=5)
            except queue.Empty:
                if collectives() is None:
                    return
                continue
            serving = collectives()
            if isinstance(item, EndThread) or serving is None:
                return
            serving._serve_item(item)
            del serving, item


def end_thread(items: Items, thread: threading.Thread, timeout_s: float = 10) -> bool:
    """End the thread of a queue after what is queued; return whether it has ended."""
    items.put(EndThread())
    if thread is not threading.current_thread():
        thread.join(timeout_s)
    return not thread.is_alive()


def leave_thread(items: Items, thread: threading.Thread, timeout: CollectiveTimeout | None) -> None:
    """End the thread of a queue that nobody has closed, soon also if it waits for another worker."""
    if not end_thread(items, thread, timeout_s=1) and timeout is not None:
        timeout.cancel()
        thread.join(10)


def decide(
    held: Sequence[Running], ended: Iterable[Callable[[], Tensor]], void: bool, agree: Agree | None = None
) -> None:
    """Give all exchanges that have asked `Decide` one answer: whether they and those that have `ended` are finite."""
    asked = [running.held for running in held if running.held is not None]
    if void:
        answer = torch.zeros_like(asked[0])
    else:
        answer = all_true([*asked, *(finite() for finite in ended)])
        answer = answer if agree is None else agree(answer)
    for running in held:
        running.answer, running.held = answer, None


class OwnStream:
    """A CUDA stream for the exchanges of a queue, so that backward goes on meanwhile; futures carry its events."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def of(self, exchanges: Iterable[Running]) -> Iterator[None]:
        """Work on it for exchanges of CUDA tensors; for all others, do nothing."""
        values = (value for running in exchanges for value in running.batch.values)
        device = next((value.device for value in values if value.is_cuda), None)
        if device is None:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield


def new_future(value: Tensor) -> Future[Tensor]:
    """Make a future that can hold `value`, and on CUDA its events."""
    return Future(devices=[value.device]) if value.is_cuda else Future()


def resolved(value: Tensor) -> Future[Tensor]:
    """Make a future that has its value already."""
    future = new_future(value)
    future.set_result(value)
    return future


def wait_for(future: Future[Tensor]) -> None:
    """Wait for a future, and raise its error. A signal can interrupt it: torch itself waits in C++, where none can."""
    if not future.done():
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        done.wait()
    future.wait()
