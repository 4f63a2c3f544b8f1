"""Process groups of an elastic run: a new default group for each generation.

A group that has lost a worker cannot be destroyed cleanly: its collectives run until their timeout, and dropping the
last reference to the group waits for them. A thread therefore keeps such groups alive until the timeout has passed.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from laconic import Session
from laconic.elastic.store import BoundedStore
from laconic.torch_private.distributed import PrefixStore, all_groups, reset_group_names, set_timeout

CONNECT_S = 2.0
"""Timeout of one connection of a new group. If a member stops meanwhile, gloo waits five times as long, and that wait
cannot be cancelled."""


def connect(store: BoundedStore, prefix: str, worker: int, workers: int) -> dist.ProcessGroup:
    """Make the default process group of a new generation."""
    reset_group_names()
    dist.init_process_group(
        "gloo",
        store=PrefixStore(prefix, store),
        rank=worker,
        world_size=workers,
        timeout=timedelta(seconds=CONNECT_S),
    )
    made = dist.group.WORLD
    assert made is not None
    return made


def regroup(session: Session, group: dist.ProcessGroup, timeout_s: float) -> None:
    """Continue a session in a new group, and raise the timeout of its collectives from that of connecting."""
    session.regroup(group)
    set_timeout(group, timeout_s)
    if session.group is not None:
        set_timeout(session.group, timeout_s)


def subgroup(group: dist.ProcessGroup, workers: list[int], timeout_s: float) -> dist.ProcessGroup:
    """Make a group of some workers of the default group; only they call it."""
    if len(workers) == group.size():
        return group
    made = dist.new_group(workers, backend="gloo", use_local_synchronization=True, timeout=timedelta(seconds=CONNECT_S))
    assert isinstance(made, dist.ProcessGroup)
    set_timeout(made, timeout_s)
    return made


def leave(timeout_s: float, *others: object) -> None:
    """Destroy all process groups without waiting for other workers.

    The groups, and `others` that belong to them, are kept alive for `timeout_s`; 0 if no collective is in flight.
    """
    if dist.is_initialized():
        if timeout_s:
            _keep_alive_queue().put((time.monotonic() + timeout_s, [all_groups(), others]))
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


@functools.cache
def _keep_alive_queue() -> queue.SimpleQueue[tuple[float, object]]:
    """Start the thread that keeps objects alive, and return its queue of (until, object)."""
    items: queue.SimpleQueue[tuple[float, object]] = queue.SimpleQueue()
    threading.Thread(target=_keep_alive, args=(items,), name="laconic-keep-alive", daemon=True).start()
    return items


def _keep_alive(items: queue.SimpleQueue[tuple[float, object]]) -> None:
    held: list[tuple[float, object]] = []  # never released at the end of the program, where that could block
    while True:
        with contextlib.suppress(queue.Empty):
            held.append(items.get(timeout=5))
        held = [each for each in held if each[0] > time.monotonic()]
