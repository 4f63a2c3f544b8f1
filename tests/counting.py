"""Count what a worker asks of the store, and which collectives it starts. Used by tests and benchmarks/scale.py."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all_single", "broadcast", "gather")


class CountingStore(Store):
    """Passes calls on to another store and counts them, those of torch's C++ and of laconic alike."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner = inner
        self.calls: Counter[str] = Counter()

    def _counted(self, name: str, *args: Any) -> Any:
        self.calls[name] += 1
        return getattr(self._inner, name)(*args)

    def set(self, key: str, value: str) -> None:
        self._counted("set", key, value)

    def get(self, key: str) -> bytes:
        found: bytes = self._counted("get", key)
        return found

    def add(self, key: str, value: int) -> int:
        return int(self._counted("add", key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._counted("check", keys))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(minutes=5)) -> None:
        self._counted("wait", keys, timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._counted("delete_key", key))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        found: bytes = self._counted("compare_set", key, expected_value, desired_value)
        return found


class CountedCollectives:
    """Counts the collectives that this process starts from Python from now on, and the bytes that it gives to each."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.payload_bytes: Counter[str] = Counter()
        for name in COLLECTIVES:
            setattr(dist, name, self._counting(name, getattr(dist, name)))

    def _counting(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def count(*args: Any, **options: Any) -> Any:
            self.calls[name] += 1
            given = args[1] if name in ("all_gather", "all_gather_into_tensor", "all_to_all_single") else args[0]
            assert isinstance(given, Tensor)
            self.payload_bytes[name] += given.nbytes
            return collective(*args, **options)

        return count

    def take(self) -> tuple[Counter[str], Counter[str]]:
        """Return calls and bytes since the last time."""
        found = self.calls.copy(), self.payload_bytes.copy()
        self.calls.clear()
        self.payload_bytes.clear()
        return found
