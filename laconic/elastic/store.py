"""The store of a run: calls that end in bounded time, and the heartbeats of the workers in it.

The client of a TCP store waits forever for a host that has lost its power. `BoundedStore` makes its calls in threads,
and waits a few seconds for each. After the first call without an answer, the store is lost for every caller. torch can
use it as the store of a process group, whose waits for keys can then be cancelled.

Every worker increments a counter in the store, and watches the counters of the others (`HeartbeatMonitor`). A thread
writes them, so a worker that computes for minutes between two collectives still counts as alive; a process that was
killed or stopped does not. Only time between this worker's own looks at the store counts: a worker that was itself
stopped for a minute does not take all others for dead when it continues.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

from laconic.comm.timeout import run_in_thread
from laconic.errors import ElasticError, ReplacedError, StoreLostError
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


class HeartbeatMonitor:
    """Writes this worker's heartbeats, and watches others: one without any for `heartbeat_timeout_s` is dead."""

    def __init__(self, store: BoundedStore, id: str, tag: str, heartbeat_timeout_s: float) -> None:
        self._store, self._id, self._tag = store, id, tag
        self._timeout_s, self._pause_s = heartbeat_timeout_s, heartbeat_timeout_s / 5
        self._lock = threading.Lock()
        self._watched: dict[str, tuple[bytes, float]] = {}
        """The last counter of each watched worker, and when it changed."""
        self._looked_s = time.monotonic()
        self._ended = threading.Event()
        self._open_attempt: int | None = None
        self.join_requested = False
        """Whether a worker waits in the attempt given to `watch_for_joins`."""
        self.error: ElasticError | None = None
        """Why the thread ended: the store is lost, or this worker was replaced."""
        self.on_death: Callable[[], object] | None = None
        """Called while a watched worker is dead, to end waits for it."""
        store.add(f"heartbeat/{tag}", 1)
        store.set(f"owner/{id}", tag)
        self._thread = threading.Thread(target=self._run, name="laconic-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and with it this worker's heartbeats."""
        self._ended.set()
        self._thread.join(timeout=10)

    def watch(self, tags: Iterable[str]) -> None:
        """Watch these workers, too; each counts as alive at first."""
        with self._lock:
            for tag in tags:
                self._watched.setdefault(tag, (b"", self._looked_s))

    def watch_only(self, tags: Iterable[str]) -> None:
        """Watch these workers and no others."""
        with self._lock:
            self._watched = {tag: self._watched.get(tag, (b"", self._looked_s)) for tag in tags}

    def alive(self, tag: str) -> bool:
        """Return whether a worker is alive. Workers that are not watched count as alive."""
        with self._lock:
            _, changed_s = self._watched.get(tag, (b"", self._looked_s))
            return tag == self._tag or self._looked_s - changed_s < self._timeout_s

    def watch_for_joins(self, attempt: int | None) -> None:
        """Set `join_requested` when a worker registers for this attempt."""
        self._open_attempt, self.join_requested = attempt, False

    def raise_if_failed(self) -> None:
        """Raise the error that ended the thread."""
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._look()
            except ElasticError as error:
                self.error = error
                return
            self._ended.wait(self._pause_s)

    def _look(self) -> None:
        self._store.add(f"heartbeat/{self._tag}", 1)
        with self._lock:
            tags = list(self._watched)
        found = self._store.read([f"owner/{self._id}", *(f"heartbeat/{tag}" for tag in tags)])
        if found is not None:
            if found[0].decode() != self._tag:
                raise ReplacedError(
                    f"another process joined as worker {self._id!r}, and an id belongs to one worker. This process "
                    "stops. If that was not intended, give every worker its own id."
                )
            self._update(dict(zip(tags, found[1:], strict=True)))
        on_death = self.on_death
        if on_death is not None and not all(self.alive(tag) for tag in tags):
            on_death()
        attempt = self._open_attempt
        if attempt is not None and self._store.add(f"{attempt}/count", 0) > 0:
            self.join_requested = attempt == self._open_attempt

    def _update(self, counts: dict[str, bytes]) -> None:
        with self._lock:
            now = time.monotonic()
            was_stopped = now - self._looked_s > 2 * self._pause_s + 0.25
            for tag in counts.keys() & self._watched.keys():
                if was_stopped or self._watched[tag][0] != counts[tag]:
                    self._watched[tag] = counts[tag], now
            self._looked_s = now
