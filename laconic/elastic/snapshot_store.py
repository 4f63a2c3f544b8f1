"""Snapshots on a disk, in one folder for each worker and generation."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import astuple, dataclass
from pathlib import Path

from laconic import checkpoint
from laconic.elastic.snapshot import Committed, Snapshot, without_residuals

GENERATION = "generation-"
LAST = "last"


class SnapshotStore:
    """The snapshots of one worker on a disk. Each worker saves its own, as a checkpoint of one worker.

    A worker reads its own, unless those of another worker in the same folder are newer: a launcher may give workers
    other ids when it starts them again. Residuals of error feedback are read by their owner only.
    """

    def __init__(self, folder: Path, id: str) -> None:
        self._folder, self._own = folder, folder / f"worker-{id}"
        self._saving: checkpoint.Saving | None = None

    def save(self, snapshots: list[Snapshot], generation: int, *, wait: bool) -> None:
        """Save the snapshots that are not saved yet, and remove older generations once this one is complete."""
        before, self._saving = self._saving, None
        if before is not None:
            before.wait()
        folder = self._own / f"{GENERATION}{generation:08d}"
        saved = [each.step for each in checkpoint.generations(folder)]
        for each in snapshots:
            if each.step > max(saved, default=-1):
                state = {"parts": each.parts, "by": None if each.by is None else astuple(each.by)}
                self._saving = checkpoint.save(folder, state, step=each.step, worker=0, workers=1, wait=wait)
        if wait or saved:
            for older in _generations(self._own):
                if older.number < generation:
                    shutil.rmtree(older.path, ignore_errors=True)

    def mark_last(self, generation: int) -> None:
        """Record that the process ended in order, and held nothing newer than what is saved of this generation."""
        new = self._own / f"{LAST}.new"
        new.write_text(str(generation))
        new.replace(self._own / LAST)

    def newest(self, count: int) -> tuple[int, list[Snapshot], bool]:
        """Read the newest generation that has good snapshots: its number, the last snapshots, whether it is `last`."""
        found = [each for owner in self._folder.glob("worker-*") for each in _generations(owner)]
        for each in sorted(found, key=lambda each: each.rank(self._own), reverse=True):
            with contextlib.suppress(checkpoint.CheckpointError, OSError):  # another worker may have just removed it
                good = [saved.step for saved in checkpoint.verify(each.path) if saved.good]
                if good:
                    return each.number, [self._read(each.path, step) for step in good[-count:]], each.last
        return 0, [], True

    def _read(self, folder: Path, step: int) -> Snapshot:
        saved = checkpoint.load(folder, step=step, worker=0, workers=1).state
        parts = saved["parts"] if folder.parent == self._own else without_residuals(saved["parts"])
        by = saved.get("by")
        return Snapshot(step, parts, None if by is None else Committed(by[0], by[1], tuple(by[2])))


@dataclass(frozen=True)
class _Generation:
    """The folder of one worker and generation. `last`: its process ended in order, and held nothing newer."""

    path: Path
    number: int
    steps: tuple[int, ...]
    last: bool

    def rank(self, own: Path) -> tuple[object, ...]:
        """A sort key. Snapshots that two processes ended with differ by one commit at most: then the own ones win."""
        mine = self.path.parent == own
        return self.number, self.last, self.last and mine, self.steps[-1:], mine


def _generations(owner: Path) -> list[_Generation]:
    last = (owner / LAST).read_text() if (owner / LAST).exists() else ""
    found = {int(path.name[-8:]): path for path in owner.glob(f"{GENERATION}*") if path.name[-8:].isdecimal()}
    steps = {number: tuple(each.step for each in checkpoint.generations(path)) for number, path in found.items()}
    return [_Generation(path, number, steps[number], last == str(number)) for number, path in found.items()]
