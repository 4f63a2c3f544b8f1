"""The ledger: every collective that a worker took part in, byte for byte.

    session.ledger.payload_bytes              what was handed to collectives
    session.ledger.totals(by="level")         the same, level by level
    session.ledger.write("ledger.jsonl")      a line for each collective

The totals cover the whole run; single entries are kept for the last `keep` collectives, or all of them on disk
where a path was given.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, TextIO


def wire_bytes(op: str, payload: int, workers: int) -> int:
    """Count the bytes that one worker puts on the network.

    A ring all-reduce sends every byte twice, but for the worker's own share: 2(p−1)/p of the payload.
    An all-gather passes each worker's part through every other: p−1 payloads.

    >>> wire_bytes("all_reduce", 1000, workers=4), wire_bytes("all_gather", 1000, workers=4)
    (1500, 3000)
    """
    if op == "all_reduce":
        return 2 * (workers - 1) * payload // workers
    return (workers - 1) * payload


@dataclass(frozen=True)
class Entry:
    """One collective, as one worker saw it."""

    step: int
    round: int
    op: str
    level: str
    phase: str
    payload_bytes: int
    wire_bytes: int
    seconds: float
    workers: int = 0


@dataclass
class Totals:
    """Sums over entries."""

    collectives: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    seconds: float = 0.0

    def add(self, entry: Entry) -> None:
        """Count one more entry."""
        self.collectives += 1
        self.payload_bytes += entry.payload_bytes
        self.wire_bytes += entry.wire_bytes
        self.seconds += entry.seconds


Column = Literal["op", "level", "phase"]


class Ledger:
    """What one worker said, in order.

    >>> ledger = Ledger()
    >>> ledger.record("all_reduce", 4000, workers=4, phase="gradient")
    >>> ledger.payload_bytes, ledger.wire_bytes
    (4000, 6000)
    >>> ledger.totals(by="phase")["gradient"].collectives
    1
    """

    def __init__(self, path: str | Path | None = None, keep: int = 10_000) -> None:
        if keep < 0:
            raise ValueError(f"Ledger(keep={keep}): the number of entries to keep must not be negative.")
        self.entries: deque[Entry] = deque(maxlen=keep)
        self.step = 0
        self._totals: dict[tuple[str, str, str], Totals] = {}
        self._lock = threading.Lock()  # exchanges record from the queue's thread
        self._file: TextIO | None = None
        self._subscribers: list[Callable[[Entry], None]] = []
        if path is not None:
            self._file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open as long as the run

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
    ) -> None:
        """Write down one collective of `payload_bytes` among `workers` workers, begun at `step` or now."""
        sent = wire_bytes(op, payload_bytes, workers)
        step = self.step if step is None else step
        entry = Entry(step, round_, op, level, phase, payload_bytes, sent, seconds, workers)
        with self._lock:
            self.entries.append(entry)
            self._totals.setdefault((op, level, phase), Totals()).add(entry)
            if self._file is not None:
                self._file.write(json.dumps(asdict(entry)) + "\n")
        for callback in self._subscribers:
            callback(entry)

    def subscribe(self, callback: Callable[[Entry], None]) -> None:
        """Call `callback` with every collective from now on, in the thread that records it."""
        self._subscribers.append(callback)

    @property
    def payload_bytes(self) -> int:
        """Bytes handed to collectives so far."""
        return sum(total.payload_bytes for total in self._all())

    @property
    def wire_bytes(self) -> int:
        """Bytes that this worker put on the network so far."""
        return sum(total.wire_bytes for total in self._all())

    @property
    def collectives(self) -> int:
        """How many collectives there were so far."""
        return sum(total.collectives for total in self._all())

    @property
    def seconds(self) -> float:
        """Seconds from launch to completion, added up; collectives in flight together count each."""
        return sum(total.seconds for total in self._all())

    def totals(self, by: Column) -> dict[str, Totals]:
        """Sum up by operation, by level or by phase."""
        columns = ("op", "level", "phase")
        if by not in columns:
            raise ValueError(f"totals(by={by!r}): entries are summed by {', '.join(columns)}.")
        column = columns.index(by)
        result: dict[str, Totals] = {}
        with self._lock:
            for key, total in self._totals.items():
                into = result.setdefault(key[column], Totals())
                for field in fields(Totals):
                    setattr(into, field.name, getattr(into, field.name) + getattr(total, field.name))
        return result

    def write(self, path: str | Path) -> None:
        """Write the entries still kept to `path`, a JSON object a line."""
        with Path(path).open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in self.jsonl())

    def jsonl(self) -> Iterator[str]:
        """Yield the entries still kept, as JSON."""
        with self._lock:
            entries = list(self.entries)
        for entry in entries:
            yield json.dumps(asdict(entry))

    def close(self) -> None:
        """Flush and close the file, if there is one. Totals stay readable."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _all(self) -> list[Totals]:
        with self._lock:
            return list(self._totals.values())
