"""Save: every worker writes its file, and worker 0 puts the checkpoint in place when all have.

    worker 0       create .step-42.tmp │           │ write, wait for all records, manifest, rename to step-42, prune
                                    barrier     barrier
    other workers                      │ find it   │ write, wait until .step-42.tmp is gone

The barrier is called twice, in the caller's thread. After that the workers coordinate through the folder alone, so the
rest can run in the background without interleaving with collectives. A worker writes its file, then `worker-00003.json`
with the file's record. If it fails, it leaves an empty record; worker 0 then removes the folder.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from laconic.atomic_write import write_atomically
from laconic.checkpoint import files
from laconic.checkpoint import folder as folders
from laconic.checkpoint.loading import StrPath, checkpoints, verify
from laconic.checkpoint.state import copy_to_host, flatten
from laconic.checkpoint.workers import Barrier, resolve_barrier, resolve_worker
from laconic.errors import CheckpointError
from laconic.values import is_number, is_whole

logger = logging.getLogger("laconic.checkpoint")

_VISIBLE_WITHIN_S = 5.0
"""How long a shared file system may take to show what another worker created."""


class Saving:
    """A save that is running or has ended. Waiting is optional: the next save waits for it, and so does the exit."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.error: CheckpointError | None = None
        """Why it failed; None while it runs, and if the checkpoint is in place."""
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        """Whether it succeeded or failed."""
        return self._ended.is_set()

    def wait(self) -> bool:
        """Wait until it has ended, and return whether the checkpoint is in place."""
        self._ended.wait()
        return self.error is None


_last: dict[tuple[str, int], Saving] = {}
"""The last background save of each folder and worker."""


def save(
    folder: StrPath,
    state: Any,
    *,
    step: int,
    worker: int | None = None,
    workers: int | None = None,
    barrier: Barrier = None,
    keep: int = 3,
    wait: bool = True,
    timeout_s: float = 600.0,
) -> Saving:
    """Save the state of this worker: dicts, lists, tuples, tensors, numbers, strings, bools and None.

    Every worker calls it, at the same step and with the same `folder`. The checkpoint appears when all workers have
    written their files; then all but the last `keep` good ones are removed. A failure, such as a full disk, is a
    `CheckpointError`, and leaves the older checkpoints as they were.

    With `wait=False` tensors are copied now and written in the background. A failure is then logged, and is `error` of
    the result. One save runs at a time: the next one waits for it.

    `worker` and `workers` default to those of torch.distributed, or 0 and 1 without it. `barrier`, a callable or a
    process group, makes the workers wait for each other; it is called twice, in this thread. `timeout_s` is how long a
    worker that has written its file waits for the others.
    """
    worker, workers = resolve_worker(worker, workers)
    _check("workers", workers, workers is not None, "given with worker, as in save(..., worker=0, workers=4)")
    _check("step", step, is_whole(step, 0) and step < 2**63, "a whole number from 0 up, such as session.step")
    _check("keep", keep, is_whole(keep), "a whole number from 1 up, such as 10**9 to keep all")
    _check("timeout_s", timeout_s, is_number(timeout_s) and timeout_s > 0, "a number of seconds above 0")
    call_barrier = resolve_barrier(barrier, workers := workers or 1)
    key = (os.path.realpath(folder), worker)
    if key in _last:
        _last[key].wait()
    task, saving = SaveTask(Path(folder), step, worker, workers, keep, timeout_s), Saving(step)
    problem: Exception | None = None
    # 1. Worker 0 makes the temporary folder, and the others find it. A full disk is reported after the barriers.
    try:
        task.begin()
    except (OSError, CheckpointError) as error:
        problem = error
    try:
        call_barrier()
        task.find()
        call_barrier()
        skeleton, tensors = flatten(state)  # a wrong `state` raises here, after the barriers where the others wait
    except BaseException:
        task.cancel()
        raise
    # 2. Copy what the caller may change next.
    try:
        tensors = tensors if wait else {name: copy_to_host(t) for name, t in tensors.items()}
    except (RuntimeError, MemoryError) as error:
        problem = error
    # 3. Write, in this thread or in another.
    finish = partial(_finish, task, saving, skeleton, tensors, problem)
    if not wait:
        _last[key] = saving
        threading.Thread(target=finish, name=f"save step {step}").start()
        return saving
    finish()
    if saving.error is not None:
        raise saving.error
    return saving


def _check(name: str, value: object, valid: bool, rule: str) -> None:
    if not valid:
        raise ValueError(f"save({name}={value!r}): {name} must be {rule}.")


def _finish(
    task: SaveTask, saving: Saving, skeleton: Any, tensors: Mapping[str, Tensor], problem: Exception | None
) -> None:
    """Write a state, in any thread, unless there is a problem already; set the error of `saving` if that fails."""
    try:
        if problem is not None:
            raise problem
        task.finish(skeleton, tensors)
        logger.info("step %d is saved in %s", task.step, task.folder)
    except BaseException as error:
        task.cancel()
        saving.error = CheckpointError(
            f"step {task.step} was not saved in {task.folder}: {error}\n  The older checkpoints are as they were. "
            "The next save tries again; if the disk is full, free some space or keep fewer."
        )
        saving.error.__cause__ = error
        if not isinstance(error, Exception):
            raise
        logger.error("%s", saving.error)
        del tensors  # the traceback would keep the copied tensors alive
        traceback.clear_frames(error.__traceback__)
    finally:
        saving._ended.set()


@dataclass
class SaveTask:
    """What one worker does to save one checkpoint. Nothing appears unless all workers succeed."""

    folder: Path
    step: int
    worker: int
    workers: int
    keep: int
    timeout_s: float
    temporary: Path | None = None
    """The folder that the workers write to: worker 0 makes it, and renames it at the end."""

    def begin(self) -> None:
        """Before the first barrier: worker 0 makes the temporary folder."""
        if self.worker > 0:
            return
        if later := [each.step for each in verify(self.folder, after=self.step) if each.good]:
            raise CheckpointError(
                f"{self.folder} already has step {later[-1]}, which is later. A folder holds one run, and its steps "
                "grow: load that step, save to another folder, or call rewind(folder, step=...) to go back."
            )
        self.temporary = folders.make_temporary(self.folder, self.step)

    def find(self) -> bool:
        """Between the barriers: the others find it, and return whether they do. Worker 0 cannot have removed it yet."""
        if self.worker > 0 and self.temporary is None:
            with suppress(CheckpointError):
                self.temporary = folders.find_temporary(self.folder, self.step)
        return self.temporary is not None

    def finish(self, skeleton: Any, tensors: Mapping[str, Tensor]) -> None:
        """After the barriers, and in any thread: write this worker's file, and complete the checkpoint."""
        # 1. The file, then its record. A shared file system may show the folder late.
        _wait_until(self.find, min(self.timeout_s, _VISIBLE_WITHIN_S))
        temporary = self.temporary
        if temporary is None:
            raise CheckpointError(
                f"worker {self.worker} does not see a temporary folder in {self.folder}: worker 0 could not create it, "
                "or they do not share the folder. With a disk for each worker, save with worker=0, workers=1."
            )
        try:
            record = files.write_flat(temporary / files.worker_file(self.worker), skeleton, tensors)
            write_atomically(self._record_path(self.worker), json.dumps(asdict(record)).encode())
        except Exception as error:
            if not temporary.is_dir():  # worker 0 has removed it, and this error only follows from that
                raise _cancelled() from error
            raise
        # 2. Worker 0 puts the checkpoint in place when all records are there; the others wait for that.
        if self.worker > 0:
            self._wait_for_commit(temporary, record)
            return
        files.write_manifest(temporary, self.step, self._collect_records())
        folders.put_in_place(temporary, self.step)
        # 3. Worker 0 removes what is older than the last `keep` good checkpoints.
        kept = 0
        for each in reversed(checkpoints(self.folder)):
            if each.step <= self.step:  # later ones are damaged, and not ours to remove
                if kept >= self.keep:
                    folders.discard(each.path)
                kept += each.good

    def cancel(self) -> None:
        """After a failure: worker 0 removes the temporary folder, and another worker leaves an empty record there."""
        if self.temporary is not None:
            with suppress(OSError):
                folders.discard(self.temporary) if self.worker == 0 else self._record_path(self.worker).write_bytes(b"")

    def _record_path(self, worker: int) -> Path:
        assert self.temporary is not None
        return self.temporary / f"worker-{worker:05d}.json"

    def _collect_records(self) -> list[files.FileRecord]:
        """Wait for the records of all workers, and remove their files."""
        paths = [self._record_path(worker) for worker in range(self.workers)]

        def read() -> dict[int, str]:
            return {worker: path.read_text() for worker, path in enumerate(paths) if path.exists()}

        _wait_until(lambda: len(found := read()) == self.workers or "" in found.values(), self.timeout_s)
        found = read()
        if failed := [worker for worker, text in found.items() if not text]:
            raise CheckpointError(f"worker {failed[0]} could not write its file; its own error gives the reason.")
        if missing := sorted(set(range(self.workers)) - set(found)):
            raise CheckpointError(f"workers {missing} did not write their files within {self.timeout_s} s.")
        for path in paths:
            os.unlink(path)
        return [files.FileRecord(**json.loads(text)) for text in found.values()]

    def _wait_for_commit(self, temporary: Path, record: files.FileRecord) -> None:
        if not _wait_until(lambda: folders.find_temporary(self.folder, self.step) != temporary, self.timeout_s):
            raise CheckpointError(f"worker 0 did not complete the checkpoint within {self.timeout_s} s.")
        with suppress(CheckpointError, OSError):
            if files.read_manifest(folders.final_path(self.folder, self.step), self.step)[self.worker] == record:
                return
        raise _cancelled()


def _cancelled() -> CheckpointError:
    return CheckpointError("worker 0 cancelled the save because another worker failed; its own error gives the reason.")


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll a condition, with growing pauses, and return whether it became true in time."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
    return done
