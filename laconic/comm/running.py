"""Exchanges that a queue runs, the futures of their callers, and the end of its thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from laconic.exchange import Exchange, First, Peers, Request, all_true, operation, own_bytes, payload_bytes
from laconic.ledger import Ledger


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


def decide(held: Sequence[Running], ended: Iterable[Callable[[], Tensor]], void: bool) -> None:
    """Give all exchanges that have asked `Decide` one answer: whether they and those that have `ended` are finite."""
    asked = [running.held for running in held if running.held is not None]
    verdict = torch.zeros_like(asked[0]) if void else all_true([*asked, *(finite() for finite in ended)])
    for running in held:
        running.answer, running.held = verdict, None


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
