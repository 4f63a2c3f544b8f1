"""The group wire: exchanges over a torch process group, many in flight, in one order.

A conductor drives all exchanges of one group. Collectives must start in the same order on every worker, but
backward passes, callbacks and threads have no common clock. So one thread starts them all, by a rule that looks
only at the order in which exchanges were submitted:

    a new exchange says its first word, then each older one, oldest first, waits for its answer and says its next.

For three buckets of two rounds each:  1a 2a 1b 3a 2b | flush: 3b.

The conductor talks on a group of its own, so that nothing else (DDP's bitmap of unused parameters, the user's own
collectives) can come between. NCCL orders by stream and its waits do not block the host: there, exchanges run in
the caller's thread, on the caller's group.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from laconic.ledger import Ledger
from laconic.wires.correspondence import Correspondents
from laconic.wires.means import mean, sums_exactly
from laconic.wires.patience import Patience
from laconic.wires.wire import Averaged, Gather, Mean, Means, Question, Questions, Whole, operation, payload_bytes

Group = dist.ProcessGroup


@dataclass(eq=False)
class _Promise:
    """What a batch of exchanges owes its caller: values that are ready when the last of them has ended."""

    values: list[Tensor]
    futures: list[Future[Tensor]]
    open: int
    quiet: bool = False

    def one_ended(self) -> None:
        self.open -= 1
        if self.open == 0:
            for future, value in zip(self.futures, self.values, strict=True):
                if not future.done():
                    future.set_result(value)

    def fail(self, error: BaseException) -> None:
        if self.quiet:
            self.open = 1
            self.one_ended()
        for future in self.futures:
            if not future.done():
                # torch's Future takes any exception, whatever its annotation says.
                future.set_exception(error)  # type: ignore[arg-type]


@dataclass(eq=False)
class _Running:
    """An exchange on its way, and the request in flight."""

    exchange: Questions
    promise: _Promise
    phase: str
    step: int = 0
    ended: bool = False
    end: Averaged | None = None
    round: int = 0
    request: Question | None = None
    answering: Generator[Any, None, Tensor] | None = None
    work: Any = None
    launched_s: float = 0.0


@dataclass(frozen=True)
class _Flush:
    """Submitted after the last exchange of a batch: let all of them end."""


@dataclass(frozen=True)
class _Stop:
    """Ends the thread."""


class Conductor:
    """Drives the exchanges of one group, and fixes the order of its collectives.

    `group=None` is a world of one: every question is answered by what was asked. With `share` it talks on `group`
    itself, for callers who wait for each batch and let nothing else talk meanwhile.
    """

    def __init__(
        self,
        group: Group | None,
        ledger: Ledger,
        level: str = "world",
        share: bool = False,
        patience_s: float | None = None,
    ) -> None:
        self.ledger = ledger
        self.level = level
        self.group = group
        self.workers = 1 if group is None else group.size()
        self._inline = group is None or self.workers == 1 or dist.get_backend(group) == "nccl"
        self.patience: Patience | None = None
        if group is not None and not self._inline and not share:
            self.group = group_of_our_own(group)
            self.patience = Patience(self.group, patience_s)
        backend = None if group is None else dist.get_backend(group)
        self._letters: Correspondents | None = None
        if self.group is not None and self.workers > 1 and backend == "gloo":
            self._letters = Correspondents(self.group)
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        self._queue: queue.SimpleQueue[_Running | _Flush | _Stop] = queue.SimpleQueue()
        self._active: list[_Running] = []
        self.broken: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], object] | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def writes_letters(self) -> bool:
        """Whether it can answer for the means of many parts at once, if they are on the CPU."""
        return self._letters is not None

    def submit(self, exchange: Questions, phase: str, value: Tensor) -> Future[Tensor]:
        """Queue an exchange; when it ends, the future's value is `value`.

        All workers must submit the same exchanges in the same order, and `flush` after the last of a batch.
        """
        future = new_future(value)
        self.submit_all([exchange], phase, [value], [future])
        return future

    def submit_all(
        self,
        exchanges: Sequence[Questions],
        phase: str,
        values: Sequence[Tensor],
        futures: Sequence[Future[Tensor]],
        quiet: bool = False,
    ) -> None:
        """Queue exchanges; when all have ended, the futures get `values`.

        So they do after an error if `quiet`, and it is for the caller to look at `broken` before values are used.
        """
        promise = _Promise(list(values), list(futures), len(exchanges), quiet)
        for exchange in exchanges:
            self._start(_Running(exchange, promise, phase, self.ledger.step))

    def _start(self, running: _Running) -> None:
        if self._inline:
            self._run_inline(running)
        else:
            self._ensure_thread()
            self._queue.put(running)

    def flush(self) -> None:
        """Let all submitted exchanges run to their end, without waiting for it."""
        if not self._inline:
            self._queue.put(_Flush())

    def run(self, exchange: Questions, phase: str) -> Averaged:
        """Run one exchange to its end, and wait for it."""
        nothing = torch.empty(0)
        running = _Running(exchange, _Promise([nothing], [new_future(nothing)], 1), phase, self.ledger.step)
        self._start(running)
        self.flush()
        running.promise.futures[0].wait()
        assert running.end is not None
        return running.end

    def close(self) -> None:
        """End the thread. The group itself goes with torch's `destroy_process_group`."""
        if self._stop is not None:
            self._stop()
        if self._letters is not None:
            self._letters.close()
        self._stop = self._thread = None

    def abandon(self) -> None:
        """Leave what is under way behind, for workers that cannot answer any more."""
        if self.patience is not None:
            self.patience.give_up()
        if self._letters is not None:
            self._letters.give_up()
        self.close()

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(weakref.ref(self), self._queue), daemon=True)
            self._thread.name = f"laconic-conductor-{self.level}"
            self._thread.start()
            # Also at the interpreter's exit, for loops that never detach: a thread that outlives it aborts the process.
            self._stop = weakref.finalize(self, _stop, self._queue, self._thread)

    def _run_inline(self, running: _Running) -> None:
        value = running.promise.values[0]
        with torch.no_grad(), self._beside(value.device) if value.is_cuda else contextlib.nullcontext():
            self._guarded(self._begin, running)
            while not running.ended and self._guarded(self._advance, running):
                pass

    @contextlib.contextmanager
    def _beside(self, device: torch.device) -> Iterator[None]:
        """Work on a stream of our own, so that backward goes on meanwhile; futures carry its events."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def _serve_one(self, item: _Running | _Flush) -> None:
        if isinstance(item, _Flush):
            while self._active:
                self._advance_all(self._active)
            return
        if self.broken is not None:
            item.promise.fail(self.broken)
            return
        older, self._active = self._active, [*self._active, item]
        self._guarded(self._begin, item)
        self._advance_all(older)

    def _advance_all(self, some: Sequence[_Running]) -> None:
        for running in list(some):
            self._guarded(self._advance, running)
        self._active = [running for running in self._active if not running.ended]

    def _guarded(self, action: Callable[[_Running], None], running: _Running) -> bool:
        """Run one step of an exchange; an error breaks the group's order, so it ends all exchanges."""
        if running.ended:
            return False
        try:
            action(running)
        except Exception as error:
            self.broken = error
            if self._letters is not None:
                self._letters.give_up()
            for each in [running, *self._active]:
                each.ended = True
                each.promise.fail(error)
            return False
        return True

    def _begin(self, running: _Running) -> None:
        self._ask(running, lambda: next(running.exchange))

    def _advance(self, running: _Running) -> None:
        """Wait for the answer in flight, hand it over, and launch what is asked next."""
        if running.work is not None:
            self._wait(running)
        try:
            assert running.answering is not None
            running.work = next(running.answering)
        except StopIteration as stop:
            answer: Tensor = stop.value
            self._record(running)
            self._ask(running, lambda: running.exchange.send(answer))

    def _wait(self, running: _Running) -> None:
        if self.patience is None:
            running.work.wait()
        else:
            what = f"step {running.step}, {running.phase} among {self.workers} workers ({self.level})"
            self.patience.wait(running.work, what)

    def _ask(self, running: _Running, proceed: Callable[[], Question]) -> None:
        try:
            request = proceed()
        except StopIteration as stop:
            running.end, running.ended = stop.value, True
            running.promise.one_ended()
            return
        running.round += 1
        running.request = request
        running.launched_s = time.perf_counter()
        running.answering = self.answer(request)
        running.work = None
        with contextlib.suppress(StopIteration):
            running.work = next(running.answering)
            return
        # Answered without the network: a world of one.
        self._ask(running, lambda: running.exchange.send(_alone(request)))

    def _record(self, running: _Running) -> None:
        assert running.request is not None
        self.ledger.record(
            operation(running.request),
            payload_bytes(running.request),
            self.workers,
            phase=running.phase,
            level=self.level,
            round_=running.round,
            step=running.step,
            seconds=time.perf_counter() - running.launched_s,
        )

    def answer(self, request: Question) -> Generator[Any, None, Tensor]:
        """Launch the collectives that answer `request`, one after the other, and return the answer."""
        if self.workers == 1:
            return _alone(request)
        if isinstance(request, Gather):
            return (yield from self._gather(request.x))
        if isinstance(request, Means):
            assert self._letters is not None
            yield self._letters.average(request.parts, None if self.patience is None else self.patience.limit_s)
            return torch.empty(0)
        if request.wide and not sums_exactly(request.x.dtype, self.workers):
            return (yield from self._wide_mean(request.x))
        x = request.x.contiguous()
        x.div_(self.workers)  # before the sum, so that nothing overflows
        yield dist.all_reduce(x, group=self.group, async_op=True)
        return x

    def _gather(self, x: Tensor) -> Generator[Any, None, Tensor]:
        out = x.new_empty((self.workers, *x.shape))
        yield dist.all_gather(list(out.unbind()), x.contiguous(), group=self.group, async_op=True)
        return out

    def _wide_mean(self, x: Tensor) -> Generator[Any, None, Tensor]:
        """Reduce-scatter by hand, summing so that equal stays equal, then all-gather: a ring all-reduce's bytes."""
        flat = x.reshape(-1)
        if self._letters is not None and flat.nbytes >= _BY_LETTER and flat.device.type == "cpu":
            yield from self.answer(Means([Whole(flat)]))
            return flat.view(x.shape)
        share = -(-flat.numel() // self.workers)  # rounded up
        padded = flat.new_zeros(self.workers * share)
        padded[: flat.numel()] = flat
        pieces = torch.empty_like(padded)
        yield dist.all_to_all_single(_as_bytes(pieces), _as_bytes(padded), group=self.group, async_op=True)
        mine = mean(pieces.view(self.workers, share).unbind()).to(x.dtype)
        rows = list(_as_bytes(padded).view(self.workers, -1).unbind())
        yield dist.all_gather(rows, _as_bytes(mine), group=self.group, async_op=True)
        return padded[: flat.numel()].view(x.shape)


def _alone(request: Question) -> Tensor:
    """Answer without the network, in a world of one."""
    if isinstance(request, Means):
        return torch.empty(0)
    return request.x if isinstance(request, Mean) else request.x[None]


_BY_LETTER = 1 << 20
"""From this many bytes on, memory costs more than the calls for each pair of workers do."""


def _as_bytes(x: Tensor) -> Tensor:
    """See a flat tensor as bytes: backends move those of any dtype, and not all dtypes."""
    return x.view(torch.uint8)


def _stop(items: queue.SimpleQueue[_Running | _Flush | _Stop], thread: threading.Thread) -> None:
    items.put(_Stop())
    if thread is not threading.current_thread():
        thread.join(timeout=10)


def new_future(value: Tensor) -> Future[Tensor]:
    """Make a future that can hold `value`, and on CUDA its events."""
    return Future(devices=[value.device]) if value.is_cuda else Future()


def resolved(value: Tensor) -> Future[Tensor]:
    """Make a future that has its value already."""
    future = new_future(value)
    future.set_result(value)
    return future


def _serve(conductor: weakref.ref[Conductor], items: queue.SimpleQueue[_Running | _Flush | _Stop]) -> None:
    """The thread: holds no reference while it waits, so that a forgotten conductor can go."""
    with torch.no_grad():
        while True:
            try:
                item = items.get(timeout=5)
            except queue.Empty:
                if conductor() is None:
                    return
                continue
            serving = conductor()
            if isinstance(item, _Stop) or serving is None:
                return
            serving._serve_one(item)
            del serving, item


def group_of_our_own(group: Group) -> Group:
    """Make a second group of the same workers; only they need to take part."""
    ranks = dist.get_process_group_ranks(group)
    backend = dist.get_backend(group)
    timeout = None  # torch's default; of gloo, that of the first group, which the user may have chosen
    if backend == "gloo":
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    ours = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
    if not isinstance(ours, Group):
        raise RuntimeError("torch.distributed.new_group() did not make this worker a member of its own group.")
    return ours
