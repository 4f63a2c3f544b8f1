"""Worker processes that live for the whole test session and take one operation after the other.

    pool = Pool(workers=3)
    replies = pool.call("step", options=...)     # one reply a worker, in their order

Processes fork from the server of `tests/workers.py`. Each operation has a limit; workers that miss it are killed, and
the next call starts new ones, so that one failing example cannot spoil the next.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tests.property.trainer import Trainer
from tests.workers import join_group

LIMIT_S = 60.0
"""How long one operation may take on all workers."""


class PoolError(AssertionError):
    """A worker died or did not answer in time."""


@dataclass(frozen=True)
class Reply:
    """What one worker answered: a value, or the error that it raised."""

    value: Any
    error: str = ""
    """The name of the exception's class; empty if there was none."""
    trace: str = ""


class Pool:
    """Starts the workers when they are first needed."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def call(self, operation: str, **arguments: Any) -> list[Reply]:
        """Let all workers run one operation of `Trainer`, and return their replies."""
        if not self._processes:
            self._start()
        message = pickle.dumps((operation, arguments))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        return self._replies(operation)

    def _replies(self, operation: str) -> list[Reply]:
        replies: dict[int, Reply] = {}
        deadline = time.monotonic() + LIMIT_S
        while len(replies) < self.workers:
            waiting = [pipe for worker, pipe in enumerate(self._pipes) if worker not in replies]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            for worker, pipe in enumerate(self._pipes):
                if pipe in ready:
                    try:
                        replies[worker] = pickle.loads(pipe.recv_bytes())  # noqa: S301 - our own child's
                    except (EOFError, ConnectionError):
                        self.close()
                        raise PoolError(f"{operation}: worker {worker} died") from None
            if not ready:
                said = "".join(f"\nworker {worker}: {reply.trace}" for worker, reply in sorted(replies.items()))
                late = [worker for worker in range(self.workers) if worker not in replies]
                self.close()
                raise PoolError(f"{operation}: workers {late} did not answer within {LIMIT_S:.0f} s{said}")
        return [replies[worker] for worker in range(self.workers)]

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        for worker in range(self.workers):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(worker, self.workers, store, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        self._replies("start")

    def close(self) -> None:
        """End all workers."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()


def _serve(worker: int, workers: int, store: str, pipe: Connection) -> None:
    """Run one operation after the other until the pipe is closed."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    logging.getLogger("laconic").setLevel(logging.ERROR)  # warnings of NaN are what we ask for
    join_group(worker, workers, store, LIMIT_S)
    trainer = Trainer(worker)
    reply = Reply(None)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            pipe.send_bytes(pickle.dumps(reply))
            operation, arguments = pickle.loads(pipe.recv_bytes())  # noqa: S301 - our own parent's
            try:
                reply = Reply(getattr(trainer, operation)(**arguments))
            except Exception as error:
                reply = Reply(str(error), type(error).__name__, traceback.format_exc())
    os._exit(0)  # no interpreter shutdown: threads that wait for a dead peer must not keep the process
