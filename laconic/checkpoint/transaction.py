"""How the workers save one checkpoint together. They coordinate through the temporary folder.

A worker writes its file, then `worker-00003.part` with the file's record. Worker 0 waits for all parts, turns them into
the manifest and renames the folder. A worker that fails leaves an empty part; worker 0 then removes the folder, and the
others see that it is gone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from safetensors import SafetensorError
from torch import Tensor

from laconic.checkpoint import files, folder
from laconic.checkpoint.loading import checkpoints, verify
from laconic.checkpoint.records import CheckpointError

Contents: TypeAlias = tuple[Any, Mapping[str, Tensor]]
"""What `tree.flatten` returns."""

T = TypeVar("T")

_VISIBLE_WITHIN_S = 5.0
"""How long a shared file system may take to show what another worker created."""


@dataclass(frozen=True)
class SaveTransaction:
    """One worker's part in saving one checkpoint. Nothing appears unless all workers succeed."""

    place: Path
    step: int
    worker: int
    workers: int
    keep: int
    timeout_s: float

    def run(self) -> Generator[None, Contents, None]:
        """Save in three parts: before the first barrier, between the barriers, and when the contents are sent."""
        return self._lead() if self.worker == 0 else self._follow()

    def _lead(self) -> Generator[None, Contents, None]:
        """On worker 0: create the temporary folder, and rename it when all workers have written."""
        self._check_no_later_step()
        folder.sweep(self.place)
        temporary = folder.make_temporary(self.place, self.step)
        try:
            with folder.locked(temporary):
                yield
                self._write(temporary, (yield))
                files.write_manifest(temporary, self.step, self._collect_records(temporary))
                folder.put_in_place(temporary, self.step)
        except BaseException:
            folder.discard(temporary)
            raise
        self._prune()

    def _follow(self) -> Generator[None, Contents, None]:
        """On another worker: write to worker 0's folder, and wait until it is renamed."""
        yield
        temporary = None
        try:
            with suppress(CheckpointError):
                temporary = folder.find_temporary(self.place, self.step)  # worker 0 cannot have removed it yet
            contents = yield
            temporary = temporary or self._find_late()
            self._wait_for_commit(temporary, self._write(temporary, contents))
        except BaseException:
            with suppress(OSError):
                if temporary is not None:
                    _part(temporary, self.worker).write_bytes(b"")
            raise

    def _check_no_later_step(self) -> None:
        if later := [each.step for each in verify(self.place, after=self.step) if each.good]:
            raise CheckpointError(
                f"{self.place} already has step {later[-1]}, which is later. A folder holds one run, and its steps "
                "grow: load that step, save to another folder, or call rewind(folder, step=...) to go back."
            )

    def _find_late(self) -> Path:
        timeout_s = min(self.timeout_s, _VISIBLE_WITHIN_S)
        found = _wait_for(lambda: folder.find_temporary(self.place, self.step), timeout_s)
        if found is None:
            raise CheckpointError(
                f"worker {self.worker} does not see a temporary folder in {self.place}: worker 0 could not create it, "
                "or they do not share the folder. With a disk for each worker, save with worker=0, workers=1."
            )
        return found

    def _write(self, temporary: Path, contents: Contents) -> files.FileRecord:
        part = _part(temporary, self.worker)
        try:
            record = files.write_worker_file(temporary / files.worker_file(self.worker), *contents)
            files.write_synced(part.with_suffix(".new"), json.dumps(asdict(record)).encode())
            os.rename(part.with_suffix(".new"), part)  # worker 0 never reads half of it
        except (OSError, SafetensorError) as error:
            if not temporary.is_dir():
                raise _cancelled() from error
            raise
        return record

    def _collect_records(self, temporary: Path) -> list[files.FileRecord]:
        """Wait for the parts of all workers, and remove them."""
        parts = [_part(temporary, worker) for worker in range(self.workers)]

        def read() -> dict[int, str]:
            return {worker: part.read_text() for worker, part in enumerate(parts) if part.exists()}

        _wait_for(lambda: len(found := read()) == self.workers or "" in found.values(), self.timeout_s)
        found = read()
        if failed := [worker for worker, text in found.items() if not text]:
            raise CheckpointError(f"worker {failed[0]} could not write its part; its own error gives the reason.")
        if missing := sorted(set(range(self.workers)) - set(found)):
            raise CheckpointError(f"workers {missing} did not write their parts within {self.timeout_s} s.")
        for part in parts:
            os.unlink(part)
        return [files.FileRecord(**json.loads(text)) for text in found.values()]

    def _wait_for_commit(self, temporary: Path, record: files.FileRecord) -> None:
        if not _wait_for(lambda: folder.find_temporary(self.place, self.step) != temporary, self.timeout_s):
            raise CheckpointError(f"worker 0 did not complete the checkpoint within {self.timeout_s} s.")
        with suppress(CheckpointError, OSError):
            if files.read_manifest(folder.final_path(self.place, self.step), self.step)[self.worker] == record:
                return
        raise _cancelled()

    def _prune(self) -> None:
        """Remove what is older than the last `keep` good checkpoints."""
        kept = 0
        for each in reversed(checkpoints(self.place)):
            if each.step <= self.step:  # later ones are damaged, and not ours to remove
                if kept >= self.keep:
                    folder.discard(each.path)
                kept += each.good


def _part(temporary: Path, worker: int) -> Path:
    return temporary / f"worker-{worker:05d}.part"


def _cancelled() -> CheckpointError:
    return CheckpointError("worker 0 cancelled the save because another worker failed; its own error gives the reason.")


def _wait_for(poll: Callable[[], T], timeout_s: float) -> T:
    """Poll, with growing pauses, until the answer is true or the time is over; return the last answer."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while not (answer := poll()) and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
    return answer
