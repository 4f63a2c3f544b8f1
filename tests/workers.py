"""Real worker processes over gloo, for tests: started fresh each time, ended by their id, never left behind.

    results = run_workers(job, workers=4, args=(...,))     # job(worker, *args) in each process

Processes fork from a server that has torch imported, so a test costs a fraction of a second to start. An error on
a worker is raised here with its traceback; a worker that outlives `timeout_s` is killed and reported.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

_context = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "laconic", "tests.workers"]
"""What the server imports when the first worker starts. A test module that needs more adds to it."""
_context.set_forkserver_preload(PRELOADED)


class WorkerError(AssertionError):
    """A worker raised, died or did not end in time."""


def run_workers(
    job: Callable[..., Any],
    workers: int,
    args: tuple[Any, ...] = (),
    timeout_s: float = 60,
    group: bool = True,
) -> list[Any]:
    """Run `job(worker, *args)` in `workers` processes of one gloo group, and return what each returned."""
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for worker in range(workers):
            here, there = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_work,
                args=(job, worker, workers, args, os.path.join(folder, "store"), there, group, timeout_s),
            )
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        try:
            return _collect(processes, pipes, timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(processes: list[Any], pipes: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    waiting = dict(enumerate(pipes))
    while waiting and time.monotonic() < deadline and not errors:
        for ready in wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic())):
            worker = pipes.index(ready)  # type: ignore[arg-type]
            del waiting[worker]
            try:
                ok, value = pickle.loads(pipes[worker].recv_bytes())  # noqa: S301 - our own child's
            except EOFError:
                processes[worker].join(5)
                errors[worker] = f"worker {worker} died with exit code {processes[worker].exitcode}"
                continue
            if ok:
                results[worker] = value
            else:
                errors[worker] = f"worker {worker} raised:\n{value}"
    if waiting and not errors:
        raise WorkerError(f"workers {sorted(waiting)} did not end within {timeout_s} s")
    if errors:
        raise WorkerError("\n".join(errors[worker] for worker in sorted(errors)))
    return [results[worker] for worker in range(len(processes))]


def join_group(worker: int, workers: int, store: str, timeout_s: float) -> None:
    """Make this process a worker of a gloo group over loopback, whose store is a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=worker,
        world_size=workers,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def _work(
    job: Callable[..., Any],
    worker: int,
    workers: int,
    args: tuple[Any, ...],
    store: str,
    pipe: Connection,
    group: bool,
    timeout_s: float,
) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if group:
            join_group(worker, workers, store, timeout_s)
            # A job may end at once, and whoever is still connecting then finds the others gone.
            connected = PrefixStore("tests", dist.distributed_c10d._get_default_store())
            connected.set(str(worker), "")
            connected.wait([str(each) for each in range(workers)])
        value = (True, job(worker, *args))
    except BaseException:
        value = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(value))
    pipe.close()
    if group and value[0]:
        # Somebody may still be connecting in a group of the job's own. Whoever is lost never comes; then we are killed.
        with contextlib.suppress(RuntimeError):
            connected.set(f"ended {worker}", "")
            connected.wait([f"ended {each}" for each in range(workers)])
        dist.destroy_process_group()
    os._exit(0)  # no interpreter shutdown: threads that wait for a dead peer must not keep the process


def listen() -> list[str]:
    """Collect what laconic says in this worker's log from now on."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("laconic").addHandler(handler)
    return said


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
