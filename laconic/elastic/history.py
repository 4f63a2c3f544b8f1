"""Snapshots of one worker: its state after a step, copied to host memory. The last two are kept, and saved.

Also what became of the samples that a worker drew, as steps are committed or undone.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from laconic import checkpoint
from laconic.atomic_write import write_atomically
from laconic.checkpoint.resizing import without_residuals
from laconic.checkpoint.state import copy_to_host
from laconic.data import ElasticSampler
from laconic.session.session import Session, Stateful

logger = logging.getLogger("laconic.elastic")

GENERATION = "generation-"
LAST = "last"
KEPT = 2
"""Members of a generation differ by one commit at most, so two snapshots are enough to find a common one."""


@dataclass(frozen=True)
class Committed:
    """A commit: the steps after `since`, up to `step`, and the ids of the workers that made them."""

    since: int
    step: int
    workers: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state of a worker after a step, copied to host memory. `by` is its commit, until that is reported."""

    step: int
    states: dict[str, Any]
    by: Committed | None = None

    @staticmethod
    def of(objects: Mapping[str, Stateful], step: int, by: Committed | None = None) -> Snapshot:
        """Copy the state of now."""
        return Snapshot(step, {name: _copied(each.state_dict()) for name, each in objects.items()}, by)

    def restore(self, objects: Mapping[str, Stateful]) -> None:
        """Load the state into the objects. Copies again, because optimizers keep the tensors that they load."""
        for name, each in objects.items():
            each.load_state_dict(_copied(self.states[name]))


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return copy_to_host(state)
    if isinstance(state, Mapping):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_copied(each) for each in state)
    return state


class History:
    """The last snapshots of a worker, newest last, and the generation that they belong to."""

    def __init__(
        self,
        objects: Mapping[str, Stateful],
        store: SnapshotStore | None = None,
        on_commit: Callable[[Committed], None] | None = None,
    ) -> None:
        self._objects, self._store, self._on_commit = objects, store, on_commit
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
            self.snapshots = [Snapshot.of(self._objects, step)]

    def check_kept(self) -> None:
        """Refuse what the session keeps only since the newest snapshot, to which a loss takes the run back."""
        session, newest = self._objects["session"], self.newest
        assert isinstance(session, Session)
        if new := session.kept.keys() - newest.states["session"].get("kept", {}).keys():
            raise RuntimeError(
                f"the session keeps {', '.join(map(repr, sorted(new)))} only since step {newest.step}, and a run that "
                "loses a worker goes back to that step, without a state of it. Call session.keep (or make the sampler) "
                "before the loop over run.steps(total)."
            )

    def take(self, step: int, workers: tuple[str, ...]) -> None:
        """Take a snapshot of a step that these workers made, unless there is one."""
        if self.newest.step < step:
            by = Committed(self.newest.step, step, workers)
            self.snapshots = [*self.snapshots, Snapshot.of(self._objects, step, by)][-KEPT:]

    def commit(self, save_every: int | None = None) -> None:
        """Mark the newest snapshot as committed, and report it once."""
        newest = self.newest
        if newest.by is None:
            return
        self.snapshots[-1] = Snapshot(newest.step, newest.states)
        self.commits += 1
        if self._on_commit is not None:
            self._on_commit(newest.by)
        if save_every and self.commits % save_every == 0:
            self._save(self.snapshots[-1:], wait=False)

    def resume(self, snapshot: Snapshot, generation: int, *, save: bool = False) -> None:
        """Continue from a snapshot in a new generation; with `save`, write it to the disk first."""
        snapshot.restore(self._objects)
        model = self._objects["model"]
        assert isinstance(model, nn.Module)
        model.zero_grad()
        self.generation, self.snapshots, self.in_memory = generation, [snapshot], True
        self.commit()
        if save:
            self._save(self.snapshots, wait=True)

    def rewind(self) -> None:
        """Restore the newest snapshot, before this worker leaves the run."""
        self.newest.restore(self._objects)

    def at(self, step: int) -> Snapshot:
        """Return the snapshot of a step."""
        return next(each for each in self.snapshots if each.step == step)

    def close(self) -> None:
        """Save all snapshots as the last of this process, unless a killed process saved them: they may be behind."""
        if self.generation and self.in_memory:
            self._save(self.snapshots, wait=True, last=True)

    def _save(self, snapshots: list[Snapshot], *, wait: bool, last: bool = False) -> None:
        """Save snapshots. An error is logged and does not end the run, for instance when the disk is full."""
        if self._store is None:
            return
        try:
            self._store.save(snapshots, self.generation, wait=wait)
            if last:
                self._store.mark_last(self.generation)
        except (checkpoint.CheckpointError, OSError) as error:
            logger.warning("step %d could not be saved, and the run goes on: %s", snapshots[-1].step, error)


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
        saved = [each.step for each in checkpoint.checkpoints(folder)]
        for each in snapshots:
            if each.step > max(saved, default=-1):
                state = {"states": each.states, "by": None if each.by is None else astuple(each.by)}
                self._saving = checkpoint.save(folder, state, step=each.step, worker=0, workers=1, wait=wait)
        if wait or saved:
            for older in _generations(self._own):
                if older.number < generation:
                    shutil.rmtree(older.path, ignore_errors=True)

    def mark_last(self, generation: int) -> None:
        """Record that the process ended in order, and held nothing newer than what is saved of this generation."""
        write_atomically(self._own / LAST, str(generation).encode())

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
        states = saved["states"] if folder.parent == self._own else without_residuals(saved["states"])
        by = saved.get("by")
        return Snapshot(step, states, None if by is None else Committed(by[0], by[1], tuple(by[2])))


@dataclass(frozen=True)
class _Generation:
    """The folder of one worker and generation. `last`: its process ended in order, and held nothing newer."""

    path: Path
    number: int
    steps: tuple[int, ...]
    last: bool

    def rank(self, own: Path) -> tuple[object, ...]:
        """Return a sort key: the snapshots to continue from have the highest.

        A newer generation comes first, then what a process saved when it ended in order, then the newer step. Two
        processes that ended in order differ by one commit at most, so of theirs a worker takes its own.
        """
        mine = self.path.parent == own
        return self.number, self.last, self.last and mine, self.steps[-1:], mine


def _generations(owner: Path) -> list[_Generation]:
    last = (owner / LAST).read_text() if (owner / LAST).exists() else ""
    found = {int(path.name[-8:]): path for path in owner.glob(f"{GENERATION}*") if path.name[-8:].isdecimal()}
    steps = {number: tuple(each.step for each in checkpoint.checkpoints(path)) for number, path in found.items()}
    return [_Generation(path, number, steps[number], last == str(number)) for number, path in found.items()]


@dataclass(frozen=True)
class Samples:
    """What became of the samples that this worker drew, since its process began.

    `applied` + `repeated` + `lost` + `undecided` = `drawn`.
    """

    drawn: int = 0
    applied: int = 0
    """Their steps were committed."""
    repeated: int = 0
    """Their steps were undone, and the workers of then drew them again."""
    lost: int = 0
    """The others decided about their steps without this worker: they have committed them, or drawn them again."""

    @property
    def undecided(self) -> int:
        """Those of the steps since the last commit."""
        return self.drawn - self.applied - self.repeated - self.lost


class SampleLedger:
    """Follows the commits of a run, and the steps that it goes back to."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._applied = self._repeated = self._lost = 0
        self._base: int | None = None
        """The last step whose commit this worker knows of."""
        self._taken: tuple[int | None, int] = (None, 0)
        """The step of the last snapshot, and what was drawn until then."""

    @property
    def now(self) -> Samples:
        """The numbers of now."""
        return Samples(self._drawn, self._applied, self._repeated, self._lost)

    @property
    def _drawn(self) -> int:
        return sum(each.drawn for each in self._session.kept.values() if isinstance(each, ElasticSampler))

    def took(self, step: int) -> None:
        """Note what was drawn until a snapshot."""
        self._taken = step, self._drawn

    def committed(self, step: int) -> None:
        """Count as applied what was drawn until the snapshot of this step, which is the last one."""
        self._base = step
        self._applied += self._taken[1] - (self._applied + self._repeated + self._lost)

    def resumed(self, step: int | None) -> None:
        """Count what is undecided, when the workers go on after this step; None if this one does not go on."""
        if step is not None and step == self._taken[0] != self._base:
            self.committed(step)
        undecided = self.now.undecided
        if step is not None and step == self._base:
            self._repeated += undecided
        else:
            self._lost += undecided
        self._base, self._taken = step, (None, self._drawn)
