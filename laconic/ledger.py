"""The ledger: every collective of a worker, with its bytes.

    session.ledger.payload_bytes              bytes passed to collectives
    session.ledger.totals(by="level")         the same for each level
    session.ledger.waited_s                   how long training stood still for them
    session.ledger.write("ledger.jsonl")      a line for each collective, and for each note

The totals cover the whole run. The ledger keeps the entries of the last `keep` collectives in memory, and writes all of
them to disk if it was given a path. A note is what something measured at a step, such as the guard; its line has the
key "note".
"""

from __future__ import annotations

import heapq
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal, TextIO


def wire_bytes(op: str, payload: int, workers: int, distance: int = 0, own: int | None = None) -> int:
    """Return the bytes that one worker sends.

    A ring all_reduce sends 2(p−1)/p of the payload: each byte twice, except the worker's own share.
    An all_to_all sends all but the worker's `own` share, by default 1/p of the payload.
    An all_gather sends p−1 payloads: each worker forwards the part of every other.
    A broadcast sends p−1 payloads in all, along gloo's binomial tree: the worker at `distance` d from its source sends
    one to each d + 2^i with 2^i > d. The source sends log₂ p payloads, and half of the workers none.
    A gather sends one payload from every worker but the first, which is at `distance` 0.

    >>> wire_bytes("all_reduce", 1000, workers=4), wire_bytes("all_gather", 1000, workers=4)
    (1500, 3000)
    >>> [wire_bytes("broadcast", 1000, workers=4, distance=d) for d in range(4)]
    [2000, 1000, 0, 0]
    >>> [wire_bytes("gather", 1000, workers=4, distance=d) for d in range(4)]
    [0, 1000, 1000, 1000]
    """
    if op == "all_reduce":
        return 2 * (workers - 1) * payload // workers
    if op == "all_to_all":
        return payload - (-(-payload // workers) if own is None else own)
    if op == "broadcast":
        return payload * sum(distance < 1 << i < workers - distance for i in range(workers.bit_length()))
    if op == "gather":
        return payload if distance else 0
    return (workers - 1) * payload


def crossing_bytes(op: str, payload: float, workers: int, unit: int) -> float:
    """Return the bytes that the first `unit` workers, such as those of one machine, send to all others.

    A ring leaves them once, with what one worker sends. In an all_to_all each of them sends to all others.

    >>> [crossing_bytes(op, 1000, workers=8, unit=4) for op in ("all_reduce", "all_gather", "all_to_all")]
    [1750.0, 7000.0, 2000.0]
    """
    if unit >= workers:
        return 0.0
    if op == "all_to_all":
        return unit * (workers - unit) * payload / workers
    if op == "broadcast":
        steps = [1 << i for i in range(workers.bit_length())]
        return payload * float(sum(d < step and unit <= d + step < workers for d in range(unit) for step in steps))
    return (2 * (workers - 1) / workers if op == "all_reduce" else workers - 1.0) * payload


@dataclass(frozen=True)
class Entry:
    """One collective of one worker."""

    step: int
    round: int
    op: str
    level: str
    phase: str
    payload_bytes: int
    wire_bytes: int
    seconds: float
    workers: int = 0


@dataclass(frozen=True)
class Note:
    """What was measured at a step: `note` tells by whom, "health" by the guard."""

    step: int
    note: str
    values: Mapping[str, float]


@dataclass
class Totals:
    """Sums over entries."""

    collectives: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    seconds: float = 0.0


Column = Literal["op", "level", "phase"]


class Ledger:
    """The collectives of one worker, in order.

    >>> ledger = Ledger()
    >>> ledger.record("all_reduce", 4000, workers=4, phase="gradient")
    >>> ledger.payload_bytes, ledger.wire_bytes
    (4000, 6000)
    >>> ledger.totals(by="phase")["gradient"].collectives
    1
    """

    def __init__(self, path: str | Path | None = None, keep: int = 10_000) -> None:
        if keep < 0:
            raise ValueError(f"Ledger(keep={keep}): keep must not be negative. To keep no entries, use 0.")
        self.entries: deque[Entry] = deque(maxlen=keep)
        self.notes: deque[Note] = deque(maxlen=keep)
        self.step = 0
        self.waited_s = 0.0
        """The seconds for which this worker's training stood still until exchanges ended; not over NCCL."""
        self._totals: dict[tuple[str, str, str], Totals] = {}
        self._lock = threading.Lock()  # exchanges record from the queue's thread
        self._file: TextIO | None = None
        self._subscribers: list[Callable[[Entry], None]] = []
        if path is not None:
            self._file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open during the whole run

    def record(
        self,
        op: str,
        payload_bytes: int,
        workers: int,
        *,
        phase: str,
        level: str = "world",
        round_: int = 1,
        seconds: float = 0.0,
        step: int | None = None,
        distance: int = 0,
        own: int | None = None,
    ) -> None:
        """Record one collective of `payload_bytes` among `workers` workers; `step` is the current one by default."""
        sent = wire_bytes(op, payload_bytes, workers, distance, own)
        step = self.step if step is None else step
        phase = str(phase)  # a member of an enumeration would print as such
        entry = Entry(step, round_, op, level, phase, payload_bytes, sent, seconds, workers)
        with self._lock:
            self.entries.append(entry)
            total = self._totals.setdefault((op, level, phase), Totals())
            total.collectives += 1
            total.payload_bytes += payload_bytes
            total.wire_bytes += sent
            total.seconds += seconds
            if self._file is not None:
                self._file.write(_json(entry) + "\n")
        for callback in self._subscribers:
            callback(entry)

    def note(self, note: str, step: int, values: Mapping[str, float]) -> None:
        """Keep what was measured at a step beside its collectives."""
        with self._lock:
            self.notes.append(Note(step, note, values))
            if self._file is not None:
                self._file.write(_json(self.notes[-1]) + "\n")

    def add_wait(self, since_s: float) -> None:
        """Count the time since `since_s`, a `time.perf_counter()`, as time for which training stood still."""
        with self._lock:
            self.waited_s += time.perf_counter() - since_s

    def subscribe(self, callback: Callable[[Entry], None]) -> None:
        """Call `callback` with every entry from now on, in the thread that records it."""
        self._subscribers.append(callback)

    @property
    def payload_bytes(self) -> int:
        """Bytes passed to collectives so far."""
        return sum(total.payload_bytes for total in self.all_totals().values())

    @property
    def wire_bytes(self) -> int:
        """Bytes that this worker sent so far."""
        return sum(total.wire_bytes for total in self.all_totals().values())

    @property
    def collectives(self) -> int:
        """The number of collectives so far."""
        return sum(total.collectives for total in self.all_totals().values())

    @property
    def seconds(self) -> float:
        """The sum of all collectives' seconds from launch to completion; concurrent ones count each."""
        return sum(total.seconds for total in self.all_totals().values())

    def totals(self, by: Column) -> dict[str, Totals]:
        """Return the totals for each operation, level or phase."""
        columns = ("op", "level", "phase")
        if by not in columns:
            raise ValueError(f"totals(by={by!r}): by must be one of {', '.join(columns)}.")
        column = columns.index(by)
        result: dict[str, Totals] = {}
        for key, total in self.all_totals().items():
            into = result.setdefault(key[column], Totals())
            for field in fields(Totals):
                setattr(into, field.name, getattr(into, field.name) + getattr(total, field.name))
        return result

    def all_totals(self) -> dict[tuple[str, str, str], Totals]:
        """Return the totals for each (operation, level, phase). Safe in any thread."""
        with self._lock:
            return {key: replace(total) for key, total in self._totals.items()}

    def write(self, path: str | Path) -> None:
        """Write the entries and notes in memory to `path`, one JSON object on each line."""
        with Path(path).open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in self.jsonl())

    def jsonl(self) -> Iterator[str]:
        """Yield the entries and notes in memory as JSON, a note after the entries of its step."""
        with self._lock:
            entries: list[Entry | Note] = [*self.entries]
            notes: list[Entry | Note] = [*self.notes]
        for row in heapq.merge(entries, notes, key=lambda row: row.step):
            yield _json(row)

    def close(self) -> None:
        """Close the file, if there is one. The totals stay readable."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def _json(row: Entry | Note) -> str:
    return json.dumps(asdict(row) if isinstance(row, Entry) else {"step": row.step, "note": row.note, **row.values})
