"""Reads files that grow: the progress of workers, and their logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

READ_EVERY_S = 0.1


class Tail:
    """Reads the lines that were added to a file since the last read. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0

    def read(self, at_end: bool = False) -> list[str]:
        """Return the new complete lines, in order; `at_end`, also a last line without a line end."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                added = file.read()
        except FileNotFoundError:
            return []
        added = added if at_end else added[: added.rfind(b"\n") + 1]
        self._read_bytes += len(added)
        return added.decode(errors="replace").splitlines()


@contextmanager
def following(paths: Sequence[Path], show: Callable[[str], None]) -> Iterator[None]:
    """Call `show` for every line that is added to the files while the block runs."""
    tails = [Tail(path) for path in paths]
    done = Event()

    def read_all() -> None:
        for tail in tails:
            for line in tail.read():
                show(line)

    def follow() -> None:
        while not done.wait(READ_EVERY_S):
            read_all()
        read_all()

    thread = Thread(target=follow, name="laconic-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
