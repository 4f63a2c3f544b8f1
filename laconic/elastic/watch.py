"""Signs of life: every worker writes a counter to the store twice a second or so, and looks at those of the others.

A thread does it, so a worker that computes for minutes between two rounds still shows that it lives; a process that was
killed or stopped does not. Who is silent is decided by what was seen between own looks: a worker that was itself
stopped for a minute does not take all others for dead when it wakes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from laconic.elastic.errors import ElasticError, ReplacedError
from laconic.elastic.store import BoundedStore


class Watch:
    """Shows that this worker lives, and sees who else does. `silence_s` is how long no sign means gone."""

    def __init__(self, store: BoundedStore, prefix: str, id: str, tag: str, silence_s: float) -> None:
        self._store, self._prefix, self._id, self._tag = store, prefix, id, tag
        self._silence_s = silence_s
        self._pause_s = silence_s / 5
        self._lock = threading.Lock()
        self._counts: dict[str, bytes] = {}
        self._changed_s: dict[str, float] = {}
        self._looked_s = time.monotonic()
        self._ended = threading.Event()
        self.open_attempt: int | None = None
        """The attempt whose seats are counted: who takes one wants the members to meet again."""
        self.wanted = False
        self.failed: ElasticError | None = None
        self.on_silence: Callable[[], object] | None = None
        """Called when a worker that is followed shows no sign of life: whoever waits for it need not wait longer."""
        store.add(f"{prefix}/beat/{tag}", 1)
        store.set(f"{prefix}/claim/{id}", tag)
        self._thread = threading.Thread(target=self._run, name="laconic-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and with it this worker's signs of life."""
        self._ended.set()
        self._thread.join(timeout=10)

    def follow(self, tags: Iterable[str]) -> None:
        """Look at these workers from now on; each counts as alive when first looked at."""
        with self._lock:
            for tag in tags:
                self._changed_s.setdefault(tag, self._looked_s)

    def follow_only(self, tags: Iterable[str]) -> None:
        """Look at these workers, and no longer at others."""
        wanted = set(tags)
        self.follow(wanted)
        with self._lock:
            self._changed_s = {tag: at for tag, at in self._changed_s.items() if tag in wanted}
            self._counts = {tag: count for tag, count in self._counts.items() if tag in wanted}

    def alive(self, tag: str) -> bool:
        """Tell whether a worker that is followed has lately shown that it lives."""
        with self._lock:
            return tag == self._tag or self._looked_s - self._changed_s.get(tag, self._looked_s) < self._silence_s

    def look_for_seats(self, attempt: int | None) -> None:
        """Set `wanted` when somebody takes a seat in this attempt."""
        self.open_attempt, self.wanted = attempt, False

    def raise_if_failed(self) -> None:
        """Raise what the thread has found: the store is gone, or this worker was replaced."""
        if self.failed is not None:
            raise self.failed

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._look()
            except ElasticError as error:
                self.failed = error
                return
            self._ended.wait(self._pause_s)

    def _look(self) -> None:
        self._store.add(f"{self._prefix}/beat/{self._tag}", 1)
        with self._lock:
            tags = list(self._changed_s)
        found = self._store.read([f"{self._prefix}/claim/{self._id}", *(f"{self._prefix}/beat/{t}" for t in tags)])
        if found is not None:
            if found[0].decode() != self._tag:
                raise ReplacedError(
                    f"another process has joined as worker {self._id!r}, and an id is one worker's. This process "
                    "stops. If it was not meant to be replaced, give every worker an id of its own."
                )
            self._note(dict(zip(tags, found[1:], strict=True)))
        report = self.on_silence
        if report is not None and not all(self.alive(tag) for tag in tags):
            report()
        attempt = self.open_attempt
        if attempt is not None and self._store.add(f"{self._prefix}/{attempt}/count", 0) > 0:
            self.wanted = attempt == self.open_attempt

    def _note(self, counts: dict[str, bytes]) -> None:
        with self._lock:
            now = time.monotonic()
            asleep = now - self._looked_s > 2 * self._pause_s + 0.25
            for tag, count in counts.items():
                if tag not in self._changed_s:
                    continue
                if asleep or self._counts.get(tag) != count:
                    self._counts[tag], self._changed_s[tag] = count, now
            self._looked_s = now
