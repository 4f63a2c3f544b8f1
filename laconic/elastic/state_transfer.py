"""State transfer: one member of a new generation sends its state to those that do not hold it.

The state travels as bytes and JSON, never as pickled objects, and its SHA-256 is compared. Residuals of error feedback
belong to one worker and are not sent: a worker that joins starts without any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm.timeout import ended
from laconic.elastic.group import subgroup
from laconic.elastic.history import History
from laconic.elastic.rendezvous import Membership
from laconic.elastic.snapshot import Snapshot, allocated, pack, unpack
from laconic.elastic.store import CancelCheck
from laconic.errors import DamagedStateError

Broadcast: TypeAlias = Callable[[Tensor], object]
"""Sends a tensor from the source to all others, in place."""


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
    send(own.parts, broadcast)
    return own


def send(parts: dict[str, Any], broadcast: Broadcast) -> None:
    """Send a state to the workers that call `receive`."""
    header, *data = pack(parts)
    for t in (torch.tensor([header.numel()]), header, *data, _digest([header, *data])):
        broadcast(t)


def receive(broadcast: Broadcast) -> dict[str, Any]:
    """Receive what `send` sent, and compare its digest."""
    length = torch.zeros(1, dtype=torch.int64)
    broadcast(length)
    header = torch.zeros(int(length), dtype=torch.uint8)
    broadcast(header)
    tensors = allocated(header)
    data, digest = [t.reshape(-1).view(torch.uint8) for t in tensors.values()], torch.zeros(32, dtype=torch.uint8)
    for t in (*data, digest):
        broadcast(t)
    if not torch.equal(digest, _digest([header, *data])):
        raise DamagedStateError(
            f"the state that this worker received ({sum(map(len, data))} bytes) has another SHA-256 than what was "
            "sent. Nothing of it is used. Start this worker again; if it happens again, check its memory and network."
        )
    return unpack(header, tensors)


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
