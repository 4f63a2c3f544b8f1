"""Process groups that come and go: one for each generation, made of torch's own parts.

A group with a worker that died or stands still cannot be ended cleanly: collectives that wait for it go on waiting
until their time is up, and whoever drops the last reference to the group waits with them. So what is left behind is put
in the care of a thread until then.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from laconic.comm.timeout import ended
from laconic.elastic.store import BoundedStore

CallOff = Callable[[], None]
"""Raises when a wait has become pointless."""

CONNECT_S = 2.0
"""How long one connection of a new group may take. When a member is stopped in between, gloo waits five times as long,
and cannot be called off meanwhile."""


def connect(store: BoundedStore, prefix: str, worker: int, workers: int) -> dist.ProcessGroup:
    """Make the world of a new generation."""
    dist.distributed_c10d._world.group_count = 0  # names must be the same on all; one that failed leaves it as it was
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


def subgroup(world: dist.ProcessGroup, workers: list[int], timeout_s: float) -> dist.ProcessGroup:
    """Make a group of some workers of the world; only they take part."""
    if len(workers) == world.size():
        return world
    made = dist.new_group(workers, backend="gloo", use_local_synchronization=True, timeout=timedelta(seconds=CONNECT_S))
    assert isinstance(made, dist.ProcessGroup)
    lengthen(made, timeout_s)
    return made


@contextlib.contextmanager
def called_off(store: BoundedStore, call_off: CallOff) -> Any:
    """Let waits for keys in the store end when they have become pointless."""
    store.call_off = call_off
    try:
        yield
    finally:
        store.call_off = None


def lengthen(group: dist.ProcessGroup | None, timeout_s: float) -> None:
    """Give collectives of a group that now stands the time that a slow network needs."""
    if group is not None:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def leave(timeout_s: float, *others: object) -> None:
    """End the world, if there is one, without waiting for anybody.

    It and `others`, which hold parts of it, are kept for `timeout_s`; 0 if nothing is under way in it.
    """
    if dist.is_initialized():
        if timeout_s:
            _bury([list(dist.distributed_c10d._world.pg_map), others], timeout_s)
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def wait(work: Any, call_off: CallOff) -> None:
    """Wait for a collective as long as it takes, unless that has become pointless."""
    while not ended(work):
        call_off()


def broadcaster(group: dist.ProcessGroup, source: int, call_off: CallOff) -> Callable[[Tensor], None]:
    """Make what gives tensors of the group's member `source` to the others."""

    def broadcast(t: Tensor) -> None:
        if t.numel():
            wait(dist.broadcast(t, group=group, group_src=source, async_op=True), call_off)

    return broadcast


def gather(group: dist.ProcessGroup, row: list[int], call_off: CallOff) -> list[list[int]]:
    """Hear a few numbers from every worker."""
    mine = torch.tensor(row)
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    wait(dist.all_gather(rows, mine, group=group, async_op=True), call_off)
    return [each.tolist() for each in rows]


_graves: queue.SimpleQueue[tuple[float, object]] = queue.SimpleQueue()
_digger: list[threading.Thread] = []


def _bury(what: object, for_s: float) -> None:
    _graves.put((time.monotonic() + for_s, what))
    if not _digger:
        _digger.append(threading.Thread(target=_keep_graves, name="laconic-graves", daemon=True))
        _digger[0].start()


def _keep_graves() -> None:
    """Hold what was left behind until its time is up. At the program's end it is simply not let go."""
    held: list[tuple[float, object]] = []
    while True:
        with contextlib.suppress(queue.Empty):
            held.append(_graves.get(timeout=5))
        now = time.monotonic()
        held = [each for each in held if each[0] > now]
