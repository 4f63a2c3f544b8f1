"""Worker processes of which one is lost on purpose; the results of the others."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

from tests.workers import _context, _work


def run_survivors(
    job: Callable[..., Any], workers: int, lost: int, args: tuple[Any, ...] = (), timeout_s: float = 60
) -> dict[int, Any]:
    """Run `job(worker, *args)` in `workers` processes, and return what all but `lost` returned.

    The job itself loses that worker, with `die` or `stand_still`. A stopped worker is killed at the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], {}
        for worker in range(workers):
            here, there = _context.Pipe(duplex=False)
            store = os.path.join(folder, "store")
            process = _context.Process(target=_work, args=(job, worker, workers, args, store, there, True, timeout_s))
            process.start()
            there.close()
            processes.append(process)
            pipes[worker] = here
        try:
            until = time.monotonic() + timeout_s
            results = {}
            for worker, pipe in pipes.items():
                if worker != lost:
                    assert pipe.poll(max(0.0, until - time.monotonic())), f"worker {worker} returned nothing"
                    ok, value = pickle.loads(pipe.recv_bytes())  # noqa: S301 - our own child's
                    assert ok, value
                    results[worker] = value
            return results
        finally:
            for process in processes:
                process.kill()  # also one that was stopped
                process.join()


def die() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def stand_still() -> None:
    """Stop this process with SIGSTOP."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)  # another thread may receive the signal first
