"""Process groups of an elastic run, a new default group for each generation, and the state that new members receive.

A group that has lost a worker cannot be destroyed cleanly: its collectives run until their timeout, and dropping the
last reference to the group waits for them. A thread therefore keeps such groups alive until the timeout has passed.

One member of a new generation sends its state to those that do not hold it: as bytes and JSON, never as pickled
objects, and its SHA-256 is compared. Residuals of error feedback belong to one worker and are not sent: a worker that
joins starts without any.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import Session
from laconic.checkpoint.resizing import without_residuals
from laconic.checkpoint.state import allocate, as_bytes, describe, flatten, unflatten
from laconic.comm.timeout import ended
from laconic.elastic.history import History, Snapshot
from laconic.elastic.rendezvous import Membership
from laconic.elastic.store import BoundedStore, CancelCheck
from laconic.errors import DamagedStateError
from laconic.torch_private.distributed import PrefixStore, all_groups, reset_group_names, set_timeout

CONNECT_S = 2.0
"""Timeout of one connection of a new group. If a member stops meanwhile, gloo waits five times as long, and that wait
cannot be cancelled."""
Broadcast: TypeAlias = Callable[[Tensor], object]
"""Sends a tensor from the source to all others, in place."""


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


def transfer(
    membership: Membership, rank: int, history: History, group: dist.ProcessGroup, timeout_s: float, check: CancelCheck
) -> Snapshot:
    """Return the snapshot to continue from: this worker's own, or one that another member sends."""
    source, receivers = membership.source, membership.receivers
    own = None if rank in receivers else history.at(membership.base)
    if own is not None and (rank != source or not receivers):
        return own
    ranks = sorted([source, *receivers])
    broadcast = _broadcast_in(subgroup(group, ranks, timeout_s), ranks.index(source), check)
    if own is None:
        return Snapshot(membership.base, receive(broadcast))
    send(own.states, broadcast)
    return own


def send(states: dict[str, Any], broadcast: Broadcast) -> None:
    """Send states, without residuals, to the workers that call `receive`."""
    skeleton, tensors = flatten(without_residuals(states))
    header = torch.frombuffer(bytearray(json.dumps([skeleton, describe(tensors)]).encode()), dtype=torch.uint8)
    data = [as_bytes(t) for t in tensors.values()]  # uint8 [bytes], each
    for t in (torch.tensor([header.numel()]), header, *data, _digest([header, *data])):
        broadcast(t)


def receive(broadcast: Broadcast) -> dict[str, Any]:
    """Receive what `send` sent, and compare its digest."""
    # 1. The header: the skeleton of the states, and the dtype and shape of each tensor.
    length = torch.zeros(1, dtype=torch.int64)
    broadcast(length)
    header = torch.zeros(int(length), dtype=torch.uint8)
    broadcast(header)
    skeleton, described = json.loads(header.numpy().tobytes())
    # 2. The data, into tensors that this worker makes, and the digest of both.
    tensors = allocate(described)
    data, digest = [t.reshape(-1).view(torch.uint8) for t in tensors.values()], torch.zeros(32, dtype=torch.uint8)
    for t in (*data, digest):
        broadcast(t)
    if not torch.equal(digest, _digest([header, *data])):
        raise DamagedStateError(
            f"the state that this worker received ({sum(map(len, data))} bytes) has another SHA-256 than what was "
            "sent. Nothing of it is used. Start this worker again; if it happens again, check its memory and network."
        )
    states: dict[str, Any] = unflatten(skeleton, tensors)
    return states


def _digest(data: Iterable[Tensor]) -> Tensor:
    digest = hashlib.sha256()
    for t in data:
        digest.update(t.numpy().data)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def _broadcast_in(group: dist.ProcessGroup, source: int, check: CancelCheck) -> Broadcast:
    """Return a broadcast from the rank `source` of a group, whose waits `check` can end."""

    def broadcast(t: Tensor) -> None:
        if t.numel():
            work = dist.broadcast(t, group=group, group_src=source, async_op=True)
            while not ended(work):
                check()

    return broadcast
