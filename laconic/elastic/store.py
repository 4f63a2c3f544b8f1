"""A torch store whose calls end in bounded time.

The client of a TCP store waits forever for a host that has lost its power. `BoundedStore` makes its calls in threads,
and waits a few seconds for each. After the first call without an answer, the store is lost for every caller. torch can
use it as the store of a process group, whose waits for keys can then be cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

from laconic.comm.timeout import run_in_thread
from laconic.errors import StoreLostError
from laconic.torch_private.distributed import Store

CancelCheck: TypeAlias = Callable[[], None]
"""Raises an error when a wait must end early."""

POLL_S = 0.01
FORM_S = 10.0
"""How long to wait at least for a key that another member writes while a group is formed."""


class BoundedStore(Store):
    """Forwards calls to another store; a call that fails, or takes more than `limit_s`, raises `StoreLostError`.

    `name` describes the store in that error.
    """

    def __init__(self, inner: Store, limit_s: float = 5.0, name: str = "the store") -> None:
        super().__init__()
        self._inner, self._limit_s, self._name = inner, limit_s, name
        self._check_cancelled: CancelCheck | None = None
        self.lost: StoreLostError | None = None

    @contextmanager
    def cancelled_by(self, check: CancelCheck) -> Iterator[None]:
        """Let `check` end waits for keys inside this block."""
        self._check_cancelled = check
        try:
            yield
        finally:
            self._check_cancelled = None

    def _call(self, method: str, *args: Any) -> Any:
        if self.lost is not None:
            raise self.lost
        try:
            return run_in_thread(lambda: getattr(self._inner, method)(*args)).result(self._limit_s)
        except NoAnswer:
            why = f"no answer for {self._limit_s:g} s"
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
        self.lost = StoreLostError(
            f"{self._name} is down, or cannot be reached from here: {why}.\n"
            "  Without it workers cannot find out who is alive, so training stops. Start the host of the store again "
            "if it is down, then the workers: with a folder, they continue from the last committed step."
        )
        raise self.lost

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        """Read a key, and wait until it is written."""
        self.wait([key])
        return bytes(self._call("get", key))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value."""
        return int(self._call("add", key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are written."""
        return bool(self._call("check", list(keys)))

    def read(self, keys: Sequence[str]) -> list[bytes] | None:
        """Read several keys in two calls; None if one of them is not written."""
        return list(self._call("multi_get", list(keys))) if self.check(keys) else None

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a key if its value is `expected`, and return its value."""
        return bytes(self._call("compare_set", key, expected, desired))

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        """Wait until all keys are written, or the wait is cancelled."""
        limit_s = timeout.total_seconds()
        if self._check_cancelled is not None:  # gloo passes its timeout of one connection, which is too short here
            limit_s = max(limit_s, FORM_S)
        until = time.monotonic() + limit_s
        while not self.check(keys):
            if self._check_cancelled is not None:
                self._check_cancelled()
            if time.monotonic() > until:
                raise RuntimeError(f"no worker wrote {', '.join(keys)} within {limit_s:g} s.")
            time.sleep(POLL_S)

    def has_extended_api(self) -> bool:
        """Return False: torch must use only the calls above."""
        return False
