"""Snapshots: a worker's state after a step, copied to host memory; and their form as plain bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from laconic.checkpoint.resizing import without_residuals
from laconic.checkpoint.state import allocate, as_bytes, copy_to_host, describe, flatten, unflatten


class Stateful(Protocol):
    """An object with a state to save and load, such as a model, an optimizer or a scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restore the state."""
        ...


@dataclass(frozen=True)
class Committed:
    """A commit: the steps after `since`, up to `step`, and the ids of the workers that made them."""

    since: int
    step: int
    workers: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state of a worker after a step, copied to host memory. `by` is its commit, until that is reported."""

    step: int
    parts: dict[str, Any]
    by: Committed | None = None

    @staticmethod
    def of(parts: Mapping[str, Stateful], step: int, by: Committed | None = None) -> Snapshot:
        """Copy the state of now."""
        return Snapshot(step, {name: _copied(part.state_dict()) for name, part in parts.items()}, by)

    def restore(self, parts: Mapping[str, Stateful]) -> None:
        """Load the state into `parts`. Copies again, because optimizers keep the tensors that they load."""
        for name, part in parts.items():
            part.load_state_dict(_copied(self.parts[name]))


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return copy_to_host(state)
    if isinstance(state, Mapping):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_copied(each) for each in state)
    return state


def pack(parts: dict[str, Any]) -> list[Tensor]:
    """Return a state without residuals as tensors of bytes: a header in JSON, then the data of each tensor."""
    tree, tensors = flatten(without_residuals(parts))
    header = torch.frombuffer(bytearray(json.dumps([tree, describe(tensors)]).encode()), dtype=torch.uint8)
    return [header, *map(as_bytes, tensors.values())]


def allocated(header: Tensor) -> dict[str, Tensor]:
    """Make the tensors that a header describes, by name, in the order of their data."""
    _, described = json.loads(header.numpy().tobytes())
    return allocate(described)


def unpack(header: Tensor, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the state that `pack` was given, without residuals."""
    tree, _ = json.loads(header.numpy().tobytes())
    parts: dict[str, Any] = unflatten(tree, tensors)
    return parts
