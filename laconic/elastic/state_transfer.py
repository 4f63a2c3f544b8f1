"""State transfer: one member of a new generation sends its state to those that do not hold it.

The state travels as bytes and JSON, never as pickled objects, and its SHA-256 is compared. Residuals of error feedback
belong to one worker and are not sent: a worker that joins starts without any.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.checkpoint.resizing import without_residuals
from laconic.checkpoint.state import allocate, as_bytes, describe, flatten, unflatten
from laconic.comm.timeout import ended
from laconic.elastic.group import subgroup
from laconic.elastic.history import History, Snapshot
from laconic.elastic.rendezvous import Membership
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
