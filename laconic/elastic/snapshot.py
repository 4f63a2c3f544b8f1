"""A worker's state after a step that all agreed on: kept in memory, on a disk, and handed to workers that join.

What is handed over travels as tensors of fixed width and JSON, never as pickled objects, and is compared by its
SHA-256. What error feedback owes is each worker's own: those who join owe nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from laconic.checkpoint.resizing import RESIDUAL
from laconic.checkpoint.tree import NATIVE_DTYPES, as_bytes, dtype_name, flatten, snapshot, unflatten
from laconic.elastic.errors import DamagedStateError

Broadcast: TypeAlias = Callable[[Tensor], None]
"""Gives a tensor of the source to all others, in place. Those without elements need not travel."""


class Stateful(Protocol):
    """A model, an optimizer, a scheduler: what can be saved and loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return what must be saved."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take it back."""
        ...


@dataclass(frozen=True)
class Committed:
    """A round that all its workers have agreed on: the steps after `since`, up to `step`, by which workers."""

    since: int
    step: int
    workers: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All parts of a worker after a step, copied to host memory. `by` tells whose round led to it, where known."""

    step: int
    parts: dict[str, Any]
    by: Committed | None = None

    @staticmethod
    def of(parts: Mapping[str, Stateful], step: int, by: Committed | None = None) -> Snapshot:
        """Copy what is there now."""
        return Snapshot(step, {name: _copied(part.state_dict()) for name, part in parts.items()}, by)

    def restore(self, parts: Mapping[str, Stateful]) -> None:
        """Put it all back. Copies again: optimizers keep the tensors that they are given."""
        for name, part in parts.items():
            part.load_state_dict(_copied(self.parts[name]))


def _copied(nest: Any) -> Any:
    if isinstance(nest, Tensor):
        return snapshot(nest)
    if isinstance(nest, Mapping):
        return {key: _copied(value) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest)(_copied(each) for each in nest)
    return nest


def send(parts: dict[str, Any], broadcast: Broadcast) -> None:
    """Hand a snapshot's parts to those who `receive`."""
    tree, tensors = flatten(without_residuals(parts))
    letters = [as_bytes(t) for t in tensors.values()]
    facts = [[name, dtype_name(t.dtype), list(t.shape)] for name, t in tensors.items()]
    text = torch.frombuffer(bytearray(json.dumps([tree, facts]).encode()), dtype=torch.uint8)
    for letter in (torch.tensor([text.numel()]), text, *letters, _digest([text, *letters])):
        broadcast(letter)


def receive(broadcast: Broadcast) -> dict[str, Any]:
    """Take what `send` sent, and check that it is that."""
    length = torch.zeros(1, dtype=torch.int64)
    broadcast(length)
    text = torch.zeros(int(length), dtype=torch.uint8)
    broadcast(text)
    tree, facts = json.loads(bytes(text.tolist()))
    tensors = {name: torch.zeros(shape, dtype=NATIVE_DTYPES[dtype]) for name, dtype, shape in facts}
    letters, digest = [_bytes(t) for t in tensors.values()], torch.zeros(32, dtype=torch.uint8)
    for letter in (*letters, digest):
        broadcast(letter)
    if not torch.equal(digest, _digest([text, *letters])):
        raise DamagedStateError(
            f"the state that this worker was handed ({sum(map(len, letters))} bytes) has another SHA-256 than what was "
            "sent. Nothing of it is used. Start this worker again; if it comes again, look at its memory and network."
        )
    parts: dict[str, Any] = unflatten(tree, tensors.__getitem__)
    return parts


def _bytes(t: Tensor) -> Tensor:
    return t.reshape(-1).view(torch.uint8)


def _digest(letters: list[Tensor]) -> Tensor:
    digest = hashlib.sha256()
    for letter in letters:
        digest.update(letter.numpy().data)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def without_residuals(nest: Any) -> Any:
    """Leave out what error feedback owes."""
    if not isinstance(nest, Mapping):
        return nest
    return {key: without_residuals(value) for key, value in nest.items() if key != RESIDUAL}
