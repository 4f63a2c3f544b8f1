"""One worker's part in saving one checkpoint. The workers coordinate through the temporary folder.

A worker writes its file, then `worker-00003.part` with the file's record. Worker 0 waits for all parts, turns them into
the manifest and renames the folder. A worker that fails leaves an empty part; worker 0 then removes the folder, and the
others see that it is gone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from laconic.checkpoint.atomic_write import write_synced
from laconic.checkpoint.folder import discard, folder_name, make_temporary, put_in_place, sweep, try_lock
from laconic.checkpoint.loading import checkpoints, verify
from laconic.checkpoint.manifest import FileRecord, Manifest, read_record, worker_file, write_manifest
from laconic.checkpoint.records import CheckpointError
from laconic.checkpoint.worker_file import write_worker_file

_VISIBLE_WITHIN_S = 5.0
"""How long a shared file system may take to show what another worker created."""


class SaveTransaction:
    """Saves one checkpoint, as one of its workers. Nothing appears unless all workers succeed."""

    def __init__(self, folder: Path, step: int, worker: int, workers: int, keep: int, timeout_s: float) -> None:
        self.folder, self.step, self.worker, self.workers = folder, step, worker, workers
        self.keep, self.timeout_s = keep, timeout_s
        self.temporary = folder / folder_name(step, "tmp")
        self._created = False
        self._fd = -1

    def begin(self) -> Exception | None:
        """On worker 0, before the first barrier: create the folder that all workers write to; return why it failed."""
        if self.worker != 0:
            return None
        try:
            later = [each.step for each in verify(self.folder, after=self.step) if each.good]
            if later:
                raise CheckpointError(
                    f"{self.folder} already has step {later[-1]}, which is later. A folder holds one run, and its "
                    "steps grow: load that step, save to another folder, or call rewind(folder, step=...) to go back."
                )
            make_temporary(self.folder, self.step)
            self._created = True
            self._fd = os.open(self.temporary, os.O_RDONLY | os.O_NOFOLLOW)
            try_lock(self._fd)
        except (OSError, CheckpointError) as error:
            return error
        return None

    def open_folder(self) -> bool:
        """Open the folder between the barriers, when worker 0 cannot have removed it yet; return whether it is open.

        The open folder identifies this save. A process left over from an earlier run would otherwise write into a new
        folder of the same name.
        """
        if self._fd < 0:
            with suppress(OSError):
                os.listdir(self.folder)  # refreshes what a network file system has cached
                self._fd = os.open(self.temporary, os.O_RDONLY | os.O_NOFOLLOW)
        return self._fd >= 0

    def write(self, skeleton: Any, tensors: Mapping[str, Tensor]) -> None:
        """After the barriers: write this worker's file, and wait until the checkpoint is in place."""
        if self.worker == 0:
            sweep(self.folder, spare=self.temporary)
        elif not _wait_until(self.open_folder, min(self.timeout_s, _VISIBLE_WITHIN_S)):
            raise CheckpointError(
                f"worker {self.worker} does not see {self.temporary}: worker 0 could not create it, or the workers do "
                "not share the folder. With a disk for each worker, save with worker=0, workers=1."
            )
        self._write_part(skeleton, tensors)
        if self.worker == 0:
            self._commit()
            self._prune()
        else:
            self._wait_for_commit()

    def roll_back(self) -> None:
        """Undo: worker 0 removes the folder, another worker marks its part as failed."""
        if self.worker == 0 and self._created:
            discard(self.temporary)
        if self.worker != 0 and self._is_ours(self.temporary):
            with suppress(OSError):
                self._part(self.worker).write_bytes(b"")

    def close(self) -> None:
        """Close the folder and release its lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _part(self, worker: int) -> Path:
        return self.temporary / f"worker-{worker:05d}.part"

    def _write_part(self, skeleton: Any, tensors: Mapping[str, Tensor]) -> None:
        part, unpublished = self._part(self.worker), self._part(self.worker).with_suffix(".new")
        try:
            self._check_ours()
            record = write_worker_file(self.temporary / worker_file(self.worker), skeleton, tensors)
            self._check_ours()
            write_synced(unpublished, json.dumps(asdict(record)).encode())
            os.rename(unpublished, part)  # worker 0 never reads half of it
        except (OSError, SafetensorError):
            self._check_ours()
            raise

    def _check_ours(self, path: Path | None = None) -> None:
        if not self._is_ours(path or self.temporary):
            raise CheckpointError(
                "worker 0 cancelled the save because a worker failed; the error of that worker gives the reason."
            )

    def _is_ours(self, path: Path) -> bool:
        """Whether a path is the folder that this save opened."""
        try:
            os.listdir(self.folder)  # as in `open_folder`
            return self._fd >= 0 and os.path.samestat(os.lstat(path), os.fstat(self._fd))
        except OSError:
            return False

    def _commit(self) -> None:
        files: dict[str, FileRecord] = {}
        missing = list(range(self.workers))

        def all_written() -> bool:
            for worker in [each for each in missing if self._part(each).exists()]:
                if not self._part(worker).stat().st_size:
                    raise CheckpointError(f"worker {worker} could not write its part; its own error gives the reason.")
                files[worker_file(worker)] = read_record(self._part(worker))
                missing.remove(worker)
            return not missing

        if not _wait_until(all_written, self.timeout_s):
            raise CheckpointError(f"workers {missing} did not write their parts within {self.timeout_s} s.")
        for worker in range(self.workers):
            os.unlink(self._part(worker))
        write_manifest(self.temporary, Manifest(self.step, self.workers, files))
        put_in_place(self.temporary, self.step)

    def _wait_for_commit(self) -> None:
        if not _wait_until(lambda: not self._is_ours(self.temporary), self.timeout_s):
            raise CheckpointError(f"worker 0 did not complete the checkpoint within {self.timeout_s} s.")
        self._check_ours(self.folder / folder_name(self.step))

    def _prune(self) -> None:
        """Remove what is older than the last `keep` good checkpoints."""
        kept = 0
        for each in reversed(checkpoints(self.folder)):
            if each.step > self.step:  # damaged, or `begin` would have refused
                continue
            if kept >= self.keep:
                discard(each.path)
            kept += each.good


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll a condition, with growing pauses, and return whether it became true in time."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
    return True
