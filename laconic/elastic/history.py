"""What one worker holds of a run: its last snapshots, of which generation they are, and what of them is on a disk."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from laconic import checkpoint
from laconic.elastic.snapshot import Committed, Snapshot, Stateful

logger = logging.getLogger("laconic.elastic")

KEPT = 2
"""Snapshots: two members of a generation never differ by more than one round."""


class History:
    """The snapshots of a worker, newest last. `generation` is the one that they were taken or handed over in."""

    def __init__(
        self, parts: Mapping[str, Stateful], shelf: Shelf | None, on_commit: Callable[[Committed], None] | None
    ) -> None:
        self._parts, self._shelf, self._on_commit = parts, shelf, on_commit
        self.generation = 0
        self.commits = 0
        self.snapshots: list[Snapshot] = []

    @property
    def newest(self) -> Snapshot:
        """The last snapshot, which may not be committed yet."""
        return self.snapshots[-1]

    def begin(self, step: int) -> None:
        """Start with what is on the disk, or with the state of now. The first time only."""
        if not self.snapshots and self._shelf is not None:
            self.generation, self.snapshots = self._shelf.newest(KEPT)
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
        if self._shelf is not None and save_every and self.commits % save_every == 0:
            self._shelf.put(self.snapshots[-1:], self.generation, wait=False)

    def adopt(self, snapshot: Snapshot, generation: int) -> None:
        """Go on from a snapshot, in a new generation."""
        snapshot.restore(self._parts)
        self.generation, self.snapshots = generation, [snapshot]
        self.settle()

    def at(self, step: int) -> Snapshot:
        """Find the snapshot of a step."""
        return next(each for each in self.snapshots if each.step == step)

    def save(self) -> None:
        """Save what there is, now; what fails is logged, as the run is ending for another reason."""
        if self._shelf is not None and self.generation:
            try:
                self._shelf.put(self.snapshots, self.generation, wait=True)
            except checkpoint.CheckpointError as error:
                logger.error("the last committed round could not be saved: %s", error)


class Shelf:
    """A worker's snapshots on a disk, by generation. Each worker saves its own, as if alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._saving: checkpoint.Saving | None = None

    def put(self, snapshots: list[Snapshot], generation: int, *, wait: bool) -> None:
        """Save snapshots that are not there yet. Those of older generations go when one of this is in place."""
        if self._saving is not None:
            self._saving.wait()
        place = self._folder / f"generation-{generation:08d}"
        there = [each.step for each in checkpoint.generations(place)]
        for each in snapshots:
            if each.step > max(there, default=-1):
                state = {"parts": each.parts}
                self._saving = checkpoint.save(place, state, step=each.step, worker=0, workers=1, wait=wait)
        if wait or there:
            for number, older in self._places():
                if number < generation:
                    shutil.rmtree(older, ignore_errors=True)

    def newest(self, count: int) -> tuple[int, list[Snapshot]]:
        """Read the last good snapshots of the newest generation that has any."""
        for number, place in sorted(self._places(), reverse=True):
            good = [each.step for each in checkpoint.verify(place) if each.good]
            if good:
                return number, [self._read(place, step) for step in good[-count:]]
        return 0, []

    def _read(self, place: Path, step: int) -> Snapshot:
        return Snapshot(step, checkpoint.load(place, step=step, worker=0, workers=1).state["parts"])

    def _places(self) -> list[tuple[int, Path]]:
        found = self._folder.glob("generation-*") if self._folder.is_dir() else []
        return [(int(place.name[11:]), place) for place in found if place.name[11:].isdecimal()]
