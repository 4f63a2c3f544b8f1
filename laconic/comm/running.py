"""Exchanges that a queue runs, the futures of their callers, and the end of its thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.futures import Future

from laconic.comm.requests import Averaged, Exchange, Request
from laconic.comm.timeout import CollectiveTimeout


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

    exchange: Exchange
    batch: Batch
    phase: str
    step: int
    ended: bool = False
    result: Averaged | None = None
    round: int = 0
    request: Request | None = None
    collectives: Generator[Any, None, Tensor] | None = None
    work: Any = None
    launched_s: float = 0.0


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


@dataclass(frozen=True)
class Stop:
    """Ends the thread of a queue."""


def end_thread(items: queue.SimpleQueue[Any], thread: threading.Thread, timeout_s: float = 10) -> bool:
    """End the thread of a queue after what is queued; return whether it has ended."""
    items.put(Stop())
    if thread is not threading.current_thread():
        thread.join(timeout_s)
    return not thread.is_alive()


def leave_thread(items: queue.SimpleQueue[Any], thread: threading.Thread, timeout: CollectiveTimeout | None) -> None:
    """End the thread of a queue that nobody has closed, soon also if it waits for another worker."""
    if not end_thread(items, thread, timeout_s=1) and timeout is not None:
        timeout.cancel()
        thread.join(10)
