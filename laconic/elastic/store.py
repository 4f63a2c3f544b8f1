"""A torch store whose every call ends in bounded time.

A TCP store's client waits for ever for a host that has lost its power. Here calls are made by a thread, and whoever
waits for one does so for a few seconds at most; from then on the store counts as lost, for every caller. torch itself
may use it as the store of a process group: then its waits can be called off, too.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from laconic.elastic.errors import StoreLostError

POLL_S = 0.01
LONGEST_S = 10.0
"""How long a key is waited for that others write while they form a group."""
_Call = tuple["Future[Any]", str, tuple[Any, ...]]


class BoundedStore(Store):
    """Passes calls on to another store; one that takes more than `limit_s`, or fails, is a `StoreLostError`."""

    def __init__(self, inner: Store, limit_s: float = 5.0) -> None:
        super().__init__()
        self._limit_s = limit_s
        self._wait_s = 60.0
        self._where = f", {inner.host}:{inner.port}," if isinstance(inner, TCPStore) else ""
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.lost: StoreLostError | None = None
        self.call_off: Callable[[], None] | None = None
        """Raises when a wait for keys has become pointless."""
        threading.Thread(target=_serve, args=(inner, self._calls), name="laconic-store", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._calls.put(None)

    def _call(self, name: str, *args: Any) -> Any:
        if self.lost is not None:
            raise self.lost
        answer: Future[Any] = Future()
        self._calls.put((answer, name, args))
        try:
            return self._answered(answer)
        except Late:
            why = f"no answer for {self._limit_s:g} s"
        except StoreLostError:
            raise
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
        self.lost = StoreLostError(
            f"the store through which workers find each other{self._where} is gone, or cut off from here: {why}.\n"
            "  Without it nobody can tell who is still there, so training stops. Start the store's host again if it is "
            "down, then the workers: with a folder, they go on from the last committed round."
        )
        raise self.lost

    def _answered(self, answer: Future[Any]) -> Any:
        """Wait for an answer, but not longer than another caller has waited already in vain."""
        until = time.monotonic() + self._limit_s
        while True:
            try:
                return answer.result(min(0.2, self._limit_s))
            except Late:
                if self.lost is not None:
                    raise self.lost from None
                if time.monotonic() > until:
                    raise

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        """Read a key, waiting for it to be written."""
        self.wait([key])
        value: bytes = self._call("get", key)
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return what it is then."""
        value: int = self._call("add", key, amount)
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all keys have been written."""
        found: bool = self._call("check", list(keys))
        return found

    def read(self, keys: Sequence[str]) -> list[bytes] | None:
        """Read keys that have been written, in two calls for all of them; None if one has not."""
        if not self.check(keys):
            return None
        values: list[bytes] = self._call("multi_get", list(keys))
        return values

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a key if it is as expected, and return what it is then."""
        value: bytes = self._call("compare_set", key, expected, desired)
        return value

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        gone: bool = self._call("delete_key", key)
        return gone

    def num_keys(self) -> int:
        """Count keys."""
        count: int = self._call("num_keys")
        return count

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have been written, or the wait is called off."""
        limit_s = self._wait_s if timeout is None else timeout.total_seconds()
        if self.call_off is not None:  # that says it sooner than gloo's timeout would, which is for one connection
            limit_s = max(limit_s, LONGEST_S)
        until = time.monotonic() + limit_s
        while not self.check(keys):
            if self.call_off is not None:
                self.call_off()
            if time.monotonic() > until:
                raise RuntimeError(f"nobody wrote {', '.join(keys)} within {limit_s:g} s.")
            time.sleep(POLL_S)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `wait` and `get` wait for a key."""
        self._wait_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """How long `wait` and `get` wait for a key."""
        return timedelta(seconds=self._wait_s)

    def has_extended_api(self) -> bool:
        """Say no: only what is above is passed on."""
        return False


def _serve(inner: Store, calls: queue.SimpleQueue[_Call | None]) -> None:
    while (item := calls.get()) is not None:
        answer, name, args = item
        try:
            answer.set_result(getattr(inner, name)(*args))
        except BaseException as error:
            answer.set_exception(error)
        del item, answer, args
