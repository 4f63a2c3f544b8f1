"""Follows what workers write of their progress: lines of JSON, in a file for each worker."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from laconic.compare.reporting import Progress

READ_EVERY_S = 0.1


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
