"""The last snapshots of one worker, in memory and on a disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from torch import nn

from laconic.checkpoint import CheckpointError
from laconic.elastic.snapshot import Committed, Snapshot, Stateful
from laconic.elastic.snapshot_store import SnapshotStore

logger = logging.getLogger("laconic.elastic")

KEPT = 2
"""Members of a generation differ by one commit at most, so two snapshots are enough to find a common one."""


class History:
    """The last snapshots of a worker, newest last, and the generation that they belong to."""

    def __init__(
        self,
        parts: Mapping[str, Stateful],
        store: SnapshotStore | None = None,
        on_commit: Callable[[Committed], None] | None = None,
    ) -> None:
        self._parts, self._store, self._on_commit = parts, store, on_commit
        self.generation = 0
        self.in_memory = True
        """False if a killed process saved the snapshots: it may have committed later steps."""
        self.commits = 0
        self.snapshots: list[Snapshot] = []

    @property
    def newest(self) -> Snapshot:
        """The last snapshot, which may not be committed yet."""
        return self.snapshots[-1]

    def begin(self, step: int) -> None:
        """Start from the disk, or else from the state of now. Later calls do nothing."""
        if not self.snapshots and self._store is not None:
            self.generation, self.snapshots, self.in_memory = self._store.newest(KEPT)
        if not self.snapshots:
            self.snapshots = [Snapshot.of(self._parts, step)]

    def take(self, step: int, workers: tuple[str, ...]) -> None:
        """Take a snapshot of a step that these workers made, unless there is one."""
        if self.newest.step < step:
            by = Committed(self.newest.step, step, workers)
            self.snapshots = [*self.snapshots, Snapshot.of(self._parts, step, by)][-KEPT:]

    def commit(self, save_every: int | None = None) -> None:
        """Mark the newest snapshot as committed, and report it once."""
        newest = self.newest
        if newest.by is None:
            return
        self.snapshots[-1] = Snapshot(newest.step, newest.parts)
        self.commits += 1
        if self._on_commit is not None:
            self._on_commit(newest.by)
        if save_every and self.commits % save_every == 0:
            self._save(self.snapshots[-1:], wait=False)

    def resume(self, snapshot: Snapshot, generation: int, *, save: bool = False) -> None:
        """Continue from a snapshot in a new generation; with `save`, write it to the disk first."""
        snapshot.restore(self._parts)
        model = self._parts["model"]
        assert isinstance(model, nn.Module)
        model.zero_grad()
        self.generation, self.snapshots, self.in_memory = generation, [snapshot], True
        self.commit()
        if save:
            self._save(self.snapshots, wait=True)

    def rewind(self) -> None:
        """Restore the newest snapshot, before this worker leaves the run."""
        self.newest.restore(self._parts)

    def at(self, step: int) -> Snapshot:
        """Return the snapshot of a step."""
        return next(each for each in self.snapshots if each.step == step)

    def close(self) -> None:
        """Save all snapshots as the last of this process."""
        if self.generation:
            self._save(self.snapshots, wait=True, last=True)

    def _save(self, snapshots: list[Snapshot], *, wait: bool, last: bool = False) -> None:
        """Save snapshots. An error is logged and does not end the run, for instance when the disk is full."""
        if self._store is None:
            return
        try:
            self._store.save(snapshots, self.generation, wait=wait)
            if last:
                self._store.mark_last(self.generation)
        except (CheckpointError, OSError) as error:
            logger.error("step %d could not be saved: %s", snapshots[-1].step, error)
