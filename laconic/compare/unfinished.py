"""Remembers the finished runs of a comparison that is not finished, so that the same command goes on from there.

The runs are kept in the user's cache folder, under a digest of everything that decides the results, and removed when
the comparison ends. What cannot be read or written is as if it were not there: a lost memory costs time, not results.
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
from laconic.compare.lab.training import Outcome, Point
from laconic.compare.script import Script
from laconic.compare.settings import Settings

Run = Settings | Script


class Unfinished:
    """The memory of one comparison."""

    def __init__(self, runs: Sequence[Run], link: str | None) -> None:
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        self._path = Path(root, "laconic", "unfinished", f"{digest(runs, link)}.json")

    def load(self) -> list[Outcome]:
        """The runs that were finished, in their order."""
        try:
            return [_outcome(row) for row in json.loads(self._path.read_text())]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def save(self, outcomes: Sequence[Outcome]) -> None:
        """Remembers the finished runs, whole or not at all."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_suffix(f".{os.getpid()}.new")
            fresh.write_text(json.dumps([asdict(outcome) for outcome in outcomes]))
            fresh.replace(self._path)

    def forget(self) -> None:
        """The comparison is done, or is to start anew."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def digest(runs: Sequence[Run], link: str | None) -> str:
    """A digest of all that decides the results: settings, link, versions, and the script's own text."""
    facts = [laconic.__version__, torch.__version__, link, *map(repr, runs), os.getcwd()]
    facts += [run.script.read_text(errors="replace") for run in runs[:1] if isinstance(run, Script)]
    return hashlib.sha256("\0".join(map(str, facts)).encode()).hexdigest()[:32]


def _outcome(row: dict[str, object]) -> Outcome:
    curve = row.pop("curve")
    assert isinstance(curve, list)
    for name in ("wire_bytes_by_worker", "interface_bytes_by_worker"):
        row[name] = tuple(row[name])  # type: ignore[arg-type]
    return Outcome(**row, curve=tuple(Point(**point) for point in curve))  # type: ignore[arg-type]
