"""How the workers of a new gloo group learn each other's addresses: through a group that they are in already.

gloo sets one key in the group's store, this worker's address, and gets one key for each worker: workers² calls, served
by the one host of the store. Here `set` is an all_gather in the older group, and `get` needs nobody else. It belongs to
the making of a group, as the calls of the store did, so the ledger does not count it.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup


class AddressStore(Store):
    """A store for the workers of `group`: each calls `set` equally often, with its own key."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self._group = group
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Exchange keys and values with all workers."""
        data = key.encode() + b"\0" + (value.encode() if isinstance(value, str) else bytes(value))
        lengths = self._gathered(torch.tensor([len(data)])).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for row, length in zip(self._gathered(padded), lengths, strict=True):
            name, _, found = row[:length].numpy().tobytes().partition(b"\0")
            self._values[name.decode()] = found

    def get(self, key: str) -> bytes:
        """Return what a worker has set."""
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return at once: what is not here yet was not set, and never will be."""
        if missing := [key for key in keys if key not in self._values]:
            raise RuntimeError(f"no worker has set {missing} while this group was made.")

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys were set."""
        return all(key in self._values for key in keys)

    def _gathered(self, row: Tensor) -> Tensor:
        rows = torch.zeros(self._group.size(), *row.shape, dtype=row.dtype)
        self._group.allgather([list(rows)], [row]).wait()
        return rows
