"""Heartbeats: every worker increments a counter in the store, and watches the counters of the others.

A thread writes them, so a worker that computes for minutes between two collectives still counts as alive; a process
that was killed or stopped does not. Only time between this worker's own looks at the store counts: a worker that was
itself stopped for a minute does not take all others for dead when it continues.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from laconic.elastic.store import BoundedStore
from laconic.errors import ElasticError, ReplacedError


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
