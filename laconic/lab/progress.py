"""How a worker tells what it is doing: lines of JSON in a file of its own.

A file needs no second connection between processes, outlives a worker that dies, and can be read by
anything. The worker writes; whoever shows the progress follows the file.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from typing import IO

WRITE_EVERY_S = 0.1
READ_EVERY_S = 0.1


@dataclass(frozen=True)
class Progress:
    """Where one worker stands after a step; all numbers are its own.

    >>> now = Progress(worker=0, step=50, steps=200, loss=2.5, tokens_per_s=1e4, sent_bytes=8, seconds=10.0)
    >>> now.seconds_left
    30.0
    """

    worker: int
    step: int
    steps: int
    loss: float
    tokens_per_s: float
    sent_bytes: int
    seconds: float

    @property
    def seconds_left(self) -> float:
        """How long the rest takes at the pace so far."""
        return self.seconds / self.step * (self.steps - self.step)


def progress_file(folder: Path, worker: int) -> Path:
    """Where a worker writes its progress."""
    return folder / f"worker-{worker}.jsonl"


class Reporter:
    """Writes a worker's progress, a line at most every tenth of a second, and always the last."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._next_s = 0.0

    def __call__(self, progress: Progress) -> None:
        """Writes `progress`, unless a line was written a moment ago."""
        now = time.monotonic()
        if now >= self._next_s or progress.step == progress.steps:
            self._file.write(json.dumps(asdict(progress)) + "\n")
            self._file.flush()
            self._next_s = now + WRITE_EVERY_S


class Tail:
    """Reads the lines that a file has gained since the last look; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0

    def news(self) -> list[Progress]:
        """What has been written since the last call, in order. A line still half written waits."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                fresh = file.read()
        except FileNotFoundError:
            return []
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return [Progress(**json.loads(line)) for line in whole.splitlines()]


@contextmanager
def following(paths: Sequence[Path], show: Callable[[Progress], None]) -> Iterator[None]:
    """Calls `show` for every line that appears in the files while the block runs."""
    tails = [Tail(path) for path in paths]
    done = Event()

    def look() -> None:
        for tail in tails:
            for progress in tail.news():
                show(progress)

    def watch() -> None:
        while not done.wait(READ_EVERY_S):
            look()
        look()

    thread = Thread(target=watch, name="laconic-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
