"""The processes of a benchmark on this machine."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any


def free_port() -> int:
    """Return a port of the loopback that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def in_processes(work: Callable[..., None], workers: int, *given: object) -> list[Any]:
    """Run `work(worker, port, results, *given)` in so many processes; return what they have put into `results`."""
    import torch.multiprocessing as mp

    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (free_port(), results, *given), nprocs=workers)
    found = []
    while not results.empty():
        found.append(results.get())
    return found
