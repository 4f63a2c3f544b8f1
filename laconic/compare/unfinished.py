"""Keeps the finished runs of a comparison until all are finished, so that the same command can continue it.

The runs are in the user's cache folder, under a digest of everything that the results depend on. A cache that cannot be
read or written is treated as empty.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import laconic
from laconic.atomic_write import write_atomically
from laconic.compare.records import Outcome, Point
from laconic.compare.settings import Run, Script


class Unfinished:
    """The finished runs of one comparison."""

    def __init__(self, runs: Sequence[Run], link: str | None) -> None:
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        self._path = Path(root, "laconic", "unfinished", f"{digest(runs, link)}.json")

    def load(self) -> list[Outcome]:
        """The outcomes that were saved, in their order."""
        try:
            return [_outcome(row) for row in json.loads(self._path.read_text())]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def save(self, outcomes: Sequence[Outcome]) -> None:
        """Save the outcomes so far."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps([asdict(outcome) for outcome in outcomes]).encode())

    def remove(self) -> None:
        """Remove what was saved: the comparison is finished."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def digest(runs: Sequence[Run], link: str | None) -> str:
    """A digest of all that the results depend on: settings, link, versions, and the text of the script."""
    facts = [laconic.__version__, torch.__version__, link, *map(repr, runs), os.getcwd()]
    facts += [run.script.read_text(errors="replace") for run in runs[:1] if isinstance(run, Script)]
    return hashlib.sha256("\0".join(map(str, facts)).encode()).hexdigest()[:32]


def _outcome(row: dict[str, object]) -> Outcome:
    curve = row.pop("curve")
    assert isinstance(curve, list)
    for name in ("wire_bytes_by_worker", "interface_bytes_by_worker"):
        row[name] = tuple(row[name])  # type: ignore[arg-type]
    return Outcome(**row, curve=tuple(Point(**point) for point in curve))  # type: ignore[arg-type]
