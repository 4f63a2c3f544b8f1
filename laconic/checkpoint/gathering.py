"""Gather the states of all workers at worker 0, for a checkpoint that only worker 0 writes.

    states = gather_states(state)     # on every worker; worker 0 gets a list, the others None

A worker does not send a tensor that is the same on worker 0, by SHA-256. In the list, such a tensor is worker 0's own
in the state of every worker, and `torch.save` writes it once. What travels is bytes and JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.checkpoint.loading import device_of
from laconic.checkpoint.state import allocate, as_bytes, copy_to_host, describe, flatten, unflatten
from laconic.ledger import Ledger

PIECE_BYTES = 16 << 20
"""How much of each worker's message travels at once. Worker 0 has room for as many pieces as there are workers."""

Facts: TypeAlias = dict[str, list[Any]]
"""The dtype, shape and SHA-256 of each tensor."""


def gather_states(state: Any, ledger: Ledger, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """Return the states of all workers, in their order, on worker 0; None on the others. Every worker calls it.

    A state is what `save` takes. `group` is torch.distributed's default group unless given.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [state]
    link = _Link(ledger, group)
    skeleton, tensors = flatten(state)
    # 1. Worker 0 sends the digests of its tensors; the others keep back what is the same.
    facts = _facts(tensors)
    first: Facts = json.loads(link.from_first(json.dumps(facts).encode()))
    own = {name: tensors[name] for name, fact in facts.items() if link.rank and fact != first.get(name)}
    # 2. Each message is a head of JSON and the bytes of tensors. Worker 0 needs their lengths, and sends none itself.
    head = json.dumps([skeleton, {name: facts[name] for name in own}]).encode() if link.rank else b""
    sizes = torch.tensor([len(head), sum(t.nbytes for t in own.values())])
    every_size = link.all(sizes).tolist()  # [workers, 2]
    message = torch.cat([torch.frombuffer(bytearray(head or b"\0"), dtype=torch.uint8), *map(as_bytes, own.values())])
    messages = link.at_first(message, max(map(sum, every_size)))
    if link.rank:
        return None
    # 3. Worker 0 reads the messages. What one does not hold is its own.
    read = [
        _read(data[:head_bytes].numpy().tobytes(), data[head_bytes : head_bytes + data_bytes], tensors)
        for data, (head_bytes, data_bytes) in zip(messages[1:], every_size[1:], strict=True)
    ]
    return [unflatten(skeleton, tensors), *read]


def _facts(tensors: Mapping[str, Tensor]) -> Facts:
    # Of a copy, because torch would not resize a tensor, as FSDP does, after its `numpy()`.
    digests = {name: hashlib.sha256(as_bytes(copy_to_host(t)).numpy().data).hexdigest() for name, t in tensors.items()}
    return {name: [*described, digests[name]] for name, described in describe(tensors).items()}


def _read(head: bytes, data: Tensor, shared: Mapping[str, Tensor]) -> Any:
    """Return a state from its message; the tensors that it does not hold are worker 0's."""
    skeleton, facts = json.loads(head)
    sent, begin = allocate({name: [dtype, shape] for name, (dtype, shape, _) in facts.items()}), 0
    for t in sent.values():
        as_bytes(t).copy_(data[begin : begin + t.nbytes])
        begin += t.nbytes
    return unflatten(skeleton, {**shared, **sent})


class _Link:
    """Collectives of bytes on the host, each recorded in a ledger."""

    def __init__(self, ledger: Ledger, group: dist.ProcessGroup | None) -> None:
        self._ledger, self._group, self._device = ledger, group, device_of(group)
        self.rank, self.workers = dist.get_rank(group), dist.get_world_size(group)

    def from_first(self, data: bytes) -> bytes:
        """Return worker 0's data on all."""
        length = torch.tensor([len(data)], device=self._device)
        self._broadcast(length)
        room = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == 0:
            room = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self._broadcast(room.to(self._device)).cpu().numpy().tobytes()

    def all(self, row: Tensor) -> Tensor:
        """Return the row of every worker."""
        rows = torch.zeros(self.workers, *row.shape, dtype=row.dtype, device=self._device)
        dist.all_gather(list(rows), row.to(self._device), group=self._group)
        self._record("all_gather", row)
        return rows.cpu()

    def at_first(self, message: Tensor, longest: int) -> list[Tensor]:
        """Return the messages of all workers on worker 0, each of `longest` bytes, in pieces; none on the others."""
        messages = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.workers)] if self.rank == 0 else []
        for begin in range(0, longest, PIECE_BYTES):
            size = min(PIECE_BYTES, longest - begin)
            piece = torch.zeros(size, dtype=torch.uint8, device=self._device)
            own = message[begin : begin + size]  # shorter than `size`, or empty, if this worker's message has ended
            piece[: own.numel()].copy_(own)
            pieces = [torch.empty_like(piece) for _ in messages]
            dist.gather(piece, pieces or None, group=self._group, group_dst=0)
            self._record("gather", piece)
            for whole, each in zip(messages, pieces, strict=True):
                whole[begin : begin + size].copy_(each)
        return messages

    def _broadcast(self, t: Tensor) -> Tensor:
        dist.broadcast(t, group=self._group, group_src=0)
        self._record("broadcast", t)
        return t

    def _record(self, op: str, t: Tensor) -> None:
        self._ledger.record(op, t.nbytes, self.workers, phase="checkpoint", distance=self.rank)
