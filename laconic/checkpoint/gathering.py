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

from laconic.checkpoint.loading import is_distributed, lowest_and_highest, wire_device
from laconic.checkpoint.state import allocate, as_bytes, copy_to_host, describe, flatten, unflatten
from laconic.ledger import Ledger

PIECE_BYTES = 16 << 20
"""How much of each worker's message travels at once. Worker 0 has room for as many pieces as there are workers."""

Facts: TypeAlias = dict[str, list[Any]]
"""The dtype, shape and SHA-256 of each tensor."""


def gather_states(state: Any, ledger: Ledger) -> list[Any] | None:
    """Return the states of all workers, in their order, on worker 0; None on the others. Every worker calls it.

    A state is what `save` takes. The workers are those of torch.distributed's default group.
    """
    if not is_distributed() or dist.get_world_size() == 1:
        return [state]
    link = _Link(ledger)
    skeleton, tensors = flatten(state)
    # 1. Worker 0 sends the digests of its tensors; the others keep back what is the same.
    facts = _facts(tensors)
    first: Facts = json.loads(link.from_first(json.dumps(facts).encode()))
    own = {name: tensors[name] for name, fact in facts.items() if fact != first.get(name)}
    # 2. A message is the length of a head in 8 bytes, a head of JSON, and the bytes of tensors. Worker 0 sends none.
    message = torch.empty(0, dtype=torch.uint8)
    if link.rank > 0:
        head = json.dumps([skeleton, {name: facts[name] for name in own}]).encode()
        begin = torch.frombuffer(bytearray(len(head).to_bytes(8) + head), dtype=torch.uint8)
        message = torch.cat([begin, *map(as_bytes, own.values())])
    messages = link.at_first(message)
    if link.rank > 0:
        return None
    # 3. Worker 0 reads the messages. What one does not hold is its own.
    return [unflatten(skeleton, tensors), *(_read(each, tensors) for each in messages[1:])]


def _facts(tensors: Mapping[str, Tensor]) -> Facts:
    # Of a copy, because torch would not resize a tensor, as FSDP does, after its `numpy()`.
    digests = {name: hashlib.sha256(as_bytes(copy_to_host(t)).numpy().data).hexdigest() for name, t in tensors.items()}
    return {name: [*described, digests[name]] for name, described in describe(tensors).items()}


def _read(message: Tensor, shared: Mapping[str, Tensor]) -> Any:
    """Return a state from its message; the tensors that it does not hold are worker 0's."""
    begin = 8 + int.from_bytes(message[:8].numpy().tobytes())
    skeleton, facts = json.loads(message[8:begin].numpy().tobytes())
    sent = allocate({name: [dtype, shape] for name, (dtype, shape, _) in facts.items()})
    for t in sent.values():
        as_bytes(t).copy_(message[begin : begin + t.nbytes])
        begin += t.nbytes
    return unflatten(skeleton, {**shared, **sent})


class _Link:
    """Collectives of bytes on the host, each recorded in a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._device = ledger, wire_device()
        self.rank, self._workers = dist.get_rank(), dist.get_world_size()

    def from_first(self, data: bytes) -> bytes:
        """Return worker 0's data on all."""
        length = self._broadcast(torch.tensor([len(data)]))
        if self.rank > 0:
            data = bytes(int(length))
        return self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8)).numpy().tobytes()

    def at_first(self, message: Tensor) -> list[Tensor]:
        """Return the messages of all workers on worker 0, in pieces and as long as the longest; none on the others."""
        longest = lowest_and_highest(message.numel())[1]
        messages = [torch.empty(longest, dtype=torch.uint8) for _ in range(self._workers)] if self.rank == 0 else []
        for begin in range(0, longest, PIECE_BYTES):
            size = min(PIECE_BYTES, longest - begin)
            piece = torch.zeros(size, dtype=torch.uint8, device=self._device)
            own = message[begin : begin + size]  # shorter than `size`, or empty, if this worker's message has ended
            piece[: own.numel()].copy_(own)
            pieces = [torch.empty_like(piece) for _ in messages]
            dist.gather(piece, pieces or None, dst=0)
            self._record("gather", piece)
            for whole, each in zip(messages, pieces, strict=True):
                whole[begin : begin + size].copy_(each)
        return messages

    def _broadcast(self, t: Tensor) -> Tensor:
        t = t.to(self._device)
        dist.broadcast(t, src=0)
        self._record("broadcast", t)
        return t.cpu()

    def _record(self, op: str, t: Tensor) -> None:
        self._ledger.record(op, t.nbytes, self._workers, phase="checkpoint", distance=self.rank)
