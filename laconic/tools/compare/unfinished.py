"""Keeps the finished runs of a comparison until all are finished, so that the same command can continue it.

The runs are in the user's cache folder, under a digest of the settings, each with the fingerprints of the files that
its results depend on. A cache that cannot be read or written is treated as empty.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import laconic
from laconic.atomic_write import write_atomically
from laconic.tools.compare.inputs import Fingerprints, changed
from laconic.tools.compare.records import Outcome, Point
from laconic.tools.compare.settings import Run


@dataclass(frozen=True)
class Finished:
    """The outcome of a run, and the files that it depends on."""

    outcome: Outcome
    files: Fingerprints


class Unfinished:
    """The finished runs of one comparison."""

    def __init__(self, runs: Sequence[Run], link: str | None) -> None:
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        self._path = Path(root, "laconic", "unfinished", f"{digest(runs, link)}.json")

    def load(self) -> tuple[list[Finished], str | None]:
        """The runs that were saved, in their order, up to the first for which a file has changed; and that file."""
        try:
            rows = json.loads(self._path.read_text())
            found = [Finished(_outcome(row["outcome"]), dict(row["files"])) for row in rows]
        except (OSError, ValueError, KeyError, TypeError):
            return [], None
        for index, each in enumerate(found):
            if (path := changed(each.files)) is not None:
                return found[:index], path
        return found, None

    def save(self, finished: Sequence[Finished]) -> None:
        """Save the runs so far."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps([asdict(each) for each in finished]).encode())

    def remove(self) -> None:
        """Remove what was saved: the comparison is finished."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def digest(runs: Sequence[Run], link: str | None) -> str:
    """A digest of the settings that the results depend on: all options, link and versions."""
    facts = [laconic.__version__, torch.__version__, link, *map(repr, runs), os.getcwd()]
    return hashlib.sha256("\0".join(map(str, facts)).encode()).hexdigest()[:32]


def _outcome(row: dict[str, object]) -> Outcome:
    for name in ("wire_bytes_by_worker", "interface_bytes_by_worker"):
        row[name] = tuple(row[name])  # type: ignore[arg-type]
    for name in ("curve", "validations"):
        row[name] = tuple(Point(**point) for point in row[name])  # type: ignore[attr-defined]
    return Outcome(**row)  # type: ignore[arg-type]
