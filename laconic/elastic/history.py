"""What one worker holds of a run: its last snapshots, of which generation they are, and what of them is on a disk."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from laconic import checkpoint
from laconic.elastic.snapshot import Committed, Snapshot, Stateful, without_residuals

logger = logging.getLogger("laconic.elastic")

PLACE = "generation-"
LAST = "last"
KEPT = 2
"""Snapshots: two members of a generation never differ by more than one round."""


class History:
    """The snapshots of a worker, newest last. `generation` is the one that they were taken or handed over in."""

    def __init__(
        self, parts: Mapping[str, Stateful], shelf: Shelf | None, on_commit: Callable[[Committed], None] | None
    ) -> None:
        self._parts, self._shelf, self._on_commit = parts, shelf, on_commit
        self.generation = 0
        self.in_memory = True
        """Whether these are the last that this worker held, and not what a process that was killed left on a disk."""
        self.commits = 0
        self.snapshots: list[Snapshot] = []

    @property
    def newest(self) -> Snapshot:
        """The last snapshot, which may not be committed yet."""
        return self.snapshots[-1]

    def begin(self, step: int) -> None:
        """Start with what is on the disk, or with the state of now. The first time only."""
        if not self.snapshots and self._shelf is not None:
            self.generation, self.snapshots, self.in_memory = self._shelf.newest(KEPT)
        if not self.snapshots:
            self.snapshots = [Snapshot.of(self._parts, step)]

    def keep(self, step: int, workers: tuple[str, ...]) -> None:
        """Copy the state of now, after a round of these workers, unless that was done."""
        if self.newest.step < step:
            by = Committed(self.newest.step, step, workers)
            self.snapshots = [*self.snapshots, Snapshot.of(self._parts, step, by)][-KEPT:]

    def settle(self, save_every: int | None = None) -> None:
        """Take the newest snapshot as committed, and tell of it once."""
        newest = self.newest
        if newest.by is None:
            return
        self.snapshots[-1] = Snapshot(newest.step, newest.parts)
        self.commits += 1
        if self._on_commit is not None:
            self._on_commit(newest.by)
        if save_every and self.commits % save_every == 0:
            self._put(self.snapshots[-1:], wait=False)

    def adopt(self, snapshot: Snapshot, generation: int, *, save: bool = False) -> None:
        """Go on from a snapshot, in a new generation; with `save`, that is on the disk before anybody goes on."""
        snapshot.restore(self._parts)
        self.generation, self.snapshots, self.in_memory = generation, [snapshot], True
        self.settle()
        if save:
            self._put(self.snapshots, wait=True)

    def back(self) -> None:
        """Go back to the newest snapshot, to leave the run with it."""
        self.newest.restore(self._parts)

    def syncs_at(self, step: int) -> Snapshot:
        """Find the snapshot of a step."""
        return next(each for each in self.snapshots if each.step == step)

    def save(self) -> None:
        """Save what there is, the last of this process."""
        if self.generation:
            self._put(self.snapshots, wait=True, last=True)

    def _put(self, snapshots: list[Snapshot], *, wait: bool, last: bool = False) -> None:
        """Save snapshots. What fails is logged: a full disk is no reason to end a run, or it is ending anyway."""
        if self._shelf is None:
            return
        try:
            self._shelf.put(snapshots, self.generation, wait=wait)
            if last:
                self._shelf.mark_last(self.generation)
        except (checkpoint.CheckpointError, OSError) as error:
            logger.error("step %d could not be saved: %s", snapshots[-1].step, error)


class Shelf:
    """Snapshots on a disk, by worker and generation. Each worker saves its own, as if alone.

    A worker reads its own, too, unless another's in the same folder are newer: a launcher may number workers anew when
    it starts them again. What error feedback owed stays with its owner.
    """

    def __init__(self, folder: Path, id: str) -> None:
        self._folder, self._own = folder, folder / f"worker-{id}"
        self._saving: checkpoint.Saving | None = None

    def put(self, snapshots: list[Snapshot], generation: int, *, wait: bool) -> None:
        """Save snapshots that are not there yet. Those of older generations go when one of this is in place."""
        before, self._saving = self._saving, None
        if before is not None:
            before.wait()
        place = self._own / f"{PLACE}{generation:08d}"
        there = [each.step for each in checkpoint.checkpoints(place)]
        for each in snapshots:
            if each.step > max(there, default=-1):
                state = {"parts": each.parts, "by": None if each.by is None else astuple(each.by)}
                self._saving = checkpoint.save(place, state, step=each.step, worker=0, workers=1, wait=wait)
        if wait or there:
            for older in _places(self._own):
                if older.number < generation:
                    shutil.rmtree(older.path, ignore_errors=True)

    def mark_last(self, generation: int) -> None:
        """Note that the process left with what is saved of this generation, and held no more."""
        written = self._own / f"{LAST}.new"
        written.write_text(str(generation))
        written.replace(self._own / LAST)

    def newest(self, count: int) -> tuple[int, list[Snapshot], bool]:
        """Read the last good snapshots of the newest generation that has any, and whether its owner held no more."""
        found = [each for owner in self._folder.glob("worker-*") for each in _places(owner)]
        for place in sorted(found, key=lambda each: each.worth(self._own), reverse=True):
            with contextlib.suppress(checkpoint.CheckpointError, OSError):  # its owner lives, and has just removed it
                good = [each.step for each in checkpoint.verify(place.path) if each.good]
                if good:
                    return place.number, [self._read(place.path, step) for step in good[-count:]], place.last
        return 0, [], True

    def _read(self, place: Path, step: int) -> Snapshot:
        saved = checkpoint.load(place, step=step, worker=0, workers=1).state
        parts = saved["parts"] if place.parent == self._own else without_residuals(saved["parts"])
        by = saved.get("by")
        return Snapshot(step, parts, None if by is None else Committed(by[0], by[1], tuple(by[2])))


@dataclass(frozen=True)
class _Place:
    """Where one worker's snapshots of one generation are. `last`: their owner left with them, and held no more."""

    path: Path
    number: int
    steps: tuple[int, ...]
    last: bool

    def worth(self, own: Path) -> tuple[object, ...]:
        """Sort by: of two that were left with, which differ by one round at most, one's own counts more."""
        mine = self.path.parent == own
        return self.number, self.last, self.last and mine, self.steps[-1:], mine


def _places(owner: Path) -> list[_Place]:
    found = {int(path.name[len(PLACE) :]): path for path in owner.glob(f"{PLACE}*") if path.name[-8:].isdecimal()}
    marked = (owner / LAST).read_text() if (owner / LAST).exists() else ""
    steps = {number: tuple(each.step for each in checkpoint.checkpoints(path)) for number, path in found.items()}
    return [_Place(path, number, steps[number], marked == str(number)) for number, path in found.items()]
