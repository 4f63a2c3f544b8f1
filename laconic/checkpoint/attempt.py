"""One worker's part in saving one generation. The workers meet through the temporary folder.

A worker's files are written to the disk, then `worker-00003.part`, which holds their digests and so says that they are
complete. Worker 0 waits for the parts of all, turns them into the manifest and renames the folder. A worker that cannot
go on leaves `worker-00003.failed`, and worker 0 then removes the folder; the others see it go.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from laconic.checkpoint.files import Facts, parse_json, read_bounded, sync_folder, to_json, write_file
from laconic.checkpoint.folder import discard, locked, make_temporary, name_of, put_in_place, sweep
from laconic.checkpoint.generation import CheckpointError
from laconic.checkpoint.loading import generations, later_than
from laconic.checkpoint.manifest import Manifest, facts_from_json, facts_to_json, files_of, write_manifest
from laconic.checkpoint.tensors import chunks

logger = logging.getLogger("laconic.checkpoint")

_SEEN_WITHIN_S = 5.0
"""How long a shared file system may take to show what another worker made."""

_GAVE_UP = "worker 0 gave up, as a part could not be written; the workers' own errors say why."


class Attempt:
    """Writing one generation, as one of its workers."""

    def __init__(self, folder: Path, step: int, worker: int, workers: int, keep: int, timeout_s: float) -> None:
        self.folder, self.step, self.worker, self.workers = folder, step, worker, workers
        self.keep, self.timeout_s = keep, timeout_s
        self.temporary = folder / name_of(step, "tmp")
        self._begun = False
        self._made: tuple[int, int] | None = None
        self._held = ExitStack()

    def begin(self) -> None:
        """On worker 0, before the barrier: make the folder that all write to."""
        if self.worker != 0:
            return
        later = [generation.step for generation in later_than(self.folder, self.step)]
        if later:
            raise CheckpointError(
                f"{self.folder} already has step {later[-1]}, which is later. A folder holds one run, whose steps only "
                "grow: load that step, save to another folder, or call rewind(folder, step=...) to go back."
            )
        make_temporary(self.folder, self.step)
        self._begun = True
        self._held.enter_context(locked(self.temporary))
        self.look()

    def look(self) -> None:
        """Between the barriers, while worker 0 cannot have removed that folder yet: note which one it is.

        A process that was left over from an earlier run would else write into a folder of the same name.
        """
        if self._made is None:
            with suppress(OSError):
                os.listdir(self.folder)  # a network file system may else remember that there was nothing
                fd = os.open(self.temporary, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
                self._held.callback(os.close, fd)  # while it is open, no other folder gets its number
                self._made = _numbers(os.fstat(fd))

    def run(self, tree: Any, tensors: Mapping[str, Tensor]) -> None:
        """After the barriers: write this worker's part, and see the generation into its place."""
        if self.worker == 0:
            sweep(self.folder, spare=self.temporary)
            self._write_part(tree, tensors)
            self._put_in_place()
            self._prune()
        else:
            self._find_temporary()
            self._write_part(tree, tensors)
            self._see_it_placed()

    def give_up(self) -> None:
        """Leave nothing of this attempt: worker 0 removes the folder, the others tell it to."""
        if self.worker == 0 and self._begun:
            discard(self.temporary)
        if self.worker != 0 and self._is_made(self.temporary):
            for name in (*files_of(self.worker), self._part(self.worker).name):
                with suppress(OSError):
                    os.unlink(self.temporary / name)
            with suppress(OSError):
                self._failed(self.worker).touch()

    def end(self) -> None:
        """Let go of the folder."""
        self._held.close()

    def _part(self, worker: int) -> Path:
        return self.temporary / f"worker-{worker:05d}.part"

    def _failed(self, worker: int) -> Path:
        return self.temporary / f"worker-{worker:05d}.failed"

    def _write_part(self, tree: Any, tensors: Mapping[str, Tensor]) -> None:
        tree_name, tensors_name = files_of(self.worker)
        facts = {
            tree_name: self._write(tree_name, [to_json(tree, "the state without its tensors")]),
            tensors_name: self._write(tensors_name, chunks(tensors)),
        }
        part = self._part(self.worker)
        self._write(part.with_suffix(".new").name, [to_json(facts_to_json(facts), "a part")])
        os.rename(part.with_suffix(".new"), part)  # so that nobody reads half of it
        sync_folder(self.temporary)

    def _write(self, name: str, data: Iterable[bytes | memoryview]) -> Facts:
        """Write a file, if the folder is still there and no other has taken its name."""
        if not self._is_made(self.temporary):
            raise CheckpointError(_GAVE_UP)
        try:
            return write_file(self.temporary / name, data)
        except FileNotFoundError as error:
            raise CheckpointError(_GAVE_UP) from error

    def _put_in_place(self) -> None:
        files = {name: facts for part in self._all_parts() for name, facts in part.items()}
        for worker in range(self.workers):
            os.unlink(self._part(worker))
        write_manifest(self.temporary, Manifest(self.step, self.workers, files))
        put_in_place(self.temporary, self.step)

    def _all_parts(self) -> list[dict[str, Facts]]:
        """Wait until every worker has written its part."""
        missing = list(range(self.workers))
        for _ in _moments(self.timeout_s):
            failed = [worker for worker in missing if os.path.lexists(self._failed(worker))]
            if failed:
                raise CheckpointError(f"worker {failed[0]} could not write its part; its own error says why.")
            missing = [worker for worker in missing if not os.path.lexists(self._part(worker))]
            if not missing:
                return [self._read_part(worker) for worker in range(self.workers)]
        raise CheckpointError(f"workers {missing} did not write their parts within {self.timeout_s} s.")

    def _read_part(self, worker: int) -> dict[str, Facts]:
        name = self._part(worker).name
        value = parse_json(read_bounded(self._part(worker)), name)
        if not isinstance(value, dict) or set(value) != set(files_of(worker)):
            raise CheckpointError(f"{name} does not list the files of worker {worker}.")
        return facts_from_json(value, name)

    def _find_temporary(self) -> None:
        for _ in _moments(min(self.timeout_s, _SEEN_WITHIN_S)):
            self.look()
            if self._made is not None:
                return
        raise CheckpointError(
            f"worker {self.worker} does not see {self.temporary}, which worker 0 makes: it could not, or the folder "
            "is not one that all workers share. With a disk for each, save to it with worker=0, workers=1."
        )

    def _see_it_placed(self) -> None:
        """Wait until the folder is no longer temporary: it has its name then, or worker 0 has removed it."""
        for _ in _moments(self.timeout_s):
            if not self._is_made(self.temporary):
                if self._is_made(self.folder / name_of(self.step)):
                    return
                raise CheckpointError(_GAVE_UP)
        raise CheckpointError(f"worker 0 did not complete the generation within {self.timeout_s} s.")

    def _is_made(self, path: Path) -> bool:
        """Whether a folder is the one that this attempt began with."""
        try:
            os.listdir(self.folder)  # as in `look`
            return _numbers(os.lstat(path)) == self._made
        except OSError:
            return False

    def _prune(self) -> None:
        """Remove what is older than the last `keep` generations that look good."""
        kept = 0
        try:
            found = generations(self.folder)
        except CheckpointError as error:  # the new one is in place all the same
            logger.warning("older generations were not removed: %s", error)
            return
        for generation in reversed(found):
            if generation.step > self.step:  # damaged, or it would have been refused
                continue
            if kept >= self.keep:
                discard(generation.path)
            kept += generation.good


def _numbers(found: os.stat_result) -> tuple[int, int]:
    """What tells a folder from every other that exists, whatever its name."""
    return found.st_dev, found.st_ino


def _moments(timeout_s: float) -> Iterator[None]:
    """Yield now, and again after ever longer pauses, until the time is up."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while True:
        yield
        if time.monotonic() >= deadline:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
