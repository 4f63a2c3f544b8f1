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
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

from laconic.atomic_write import write_atomically
from laconic.checkpoint import files
from laconic.checkpoint.loading import StrPath, checkpoints, is_distributed, resolve_worker, verify
from laconic.checkpoint.state import copy_to_host, flatten
from laconic.errors import CheckpointError
from laconic.values import is_number, is_whole

logger = logging.getLogger("laconic.checkpoint")

Barrier: TypeAlias = Callable[[], object] | dist.ProcessGroup | None

_VISIBLE_WITHIN_S = 5.0
"""How long a shared file system may take to show what another worker created."""


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
    call_barrier = _barrier_of(barrier, workers := workers or 1)
    key = (os.path.realpath(folder), worker)
    if key in _last:
        _last[key].wait()
    saving = Saving(Path(folder), step, worker, workers, keep, timeout_s)
    problem: Exception | None = None
    # 1. Worker 0 makes the temporary folder, and the others find it. A full disk is reported after the barriers.
    try:
        saving._begin()
    except (OSError, CheckpointError) as error:
        problem = error
    try:
        call_barrier()
        saving._find()
        call_barrier()
        skeleton, tensors = flatten(state)  # a wrong `state` raises here, after the barriers where the others wait
    except BaseException:
        saving._cancel()
        raise
    # 2. Copy what the caller may change next.
    try:
        tensors = tensors if wait else {name: copy_to_host(t) for name, t in tensors.items()}
    except (RuntimeError, MemoryError) as error:
        problem = error
    # 3. Write, in this thread or in another.
    if not wait:
        _last[key] = saving
        threading.Thread(target=saving._finish, args=(skeleton, tensors, problem), name=f"save step {step}").start()
        return saving
    saving._finish(skeleton, tensors, problem)
    if saving.error is not None:
        raise saving.error
    return saving


def _check(name: str, value: object, valid: bool, rule: str) -> None:
    if not valid:
        raise ValueError(f"save({name}={value!r}): {name} must be {rule}.")


def _barrier_of(barrier: Barrier, workers: int) -> Callable[[], object]:
    """Return the callable that waits for all workers."""
    if workers == 1:
        return lambda: None
    if callable(barrier):
        return barrier
    if not is_distributed() or dist.get_world_size(barrier) != workers:
        raise ValueError(
            f"save(workers={workers}, barrier={barrier!r}): the workers must wait for each other. Give a process group "
            "of those that save, or a callable that returns when all have called it."
        )
    return lambda: dist.barrier(barrier)


class Saving:
    """A save that is running or has ended. Waiting is optional: the next save waits for it, and so does the exit.

    What this worker does to save one checkpoint. Nothing appears unless all workers succeed.
    """

    def __init__(self, folder: Path, step: int, worker: int, workers: int, keep: int, timeout_s: float) -> None:
        self.step = step
        self.error: CheckpointError | None = None
        """Why it failed; None while it runs, and if the checkpoint is in place."""
        self._folder, self._worker, self._workers = folder, worker, workers
        self._keep, self._timeout_s = keep, timeout_s
        self._temporary: Path | None = None
        """The folder that the workers write to: worker 0 makes it, and renames it at the end."""
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        """Whether it succeeded or failed."""
        return self._ended.is_set()

    def wait(self) -> bool:
        """Wait until it has ended, and return whether the checkpoint is in place."""
        self._ended.wait()
        return self.error is None

    def _begin(self) -> None:
        """Before the first barrier: worker 0 makes the temporary folder."""
        if self._worker > 0:
            return
        if later := [each.step for each in verify(self._folder, after=self.step) if each.good]:
            raise CheckpointError(
                f"{self._folder} already has step {later[-1]}, which is later. A folder holds one run, and its steps "
                "grow: load that step, save to another folder, or call rewind(folder, step=...) to go back."
            )
        self._temporary = files.make_temporary(self._folder, self.step)

    def _find(self) -> bool:
        """Between the barriers: the others find it, and return whether they do. Worker 0 cannot have removed it yet."""
        if self._worker > 0 and self._temporary is None:
            with suppress(CheckpointError):
                self._temporary = files.find_temporary(self._folder, self.step)
        return self._temporary is not None

    def _finish(self, skeleton: Any, tensors: Mapping[str, Tensor], problem: Exception | None) -> None:
        """After the barriers, in any thread: write, unless there is a problem already. A failure becomes `error`."""
        try:
            if problem is not None:
                raise problem
            self._write(skeleton, tensors)
            logger.info("step %d is saved in %s", self.step, self._folder)
        except BaseException as error:
            self._cancel()
            self.error = CheckpointError(
                f"step {self.step} was not saved in {self._folder}: {error}\n  The older checkpoints are as they were. "
                "The next save tries again; if the disk is full, free some space or keep fewer."
            )
            self.error.__cause__ = error
            if not isinstance(error, Exception):
                raise
            logger.error("%s", self.error)
            del tensors  # the traceback would keep the copied tensors alive
            traceback.clear_frames(error.__traceback__)
        finally:
            self._ended.set()

    def _write(self, skeleton: Any, tensors: Mapping[str, Tensor]) -> None:
        """Write this worker's file, and complete the checkpoint."""
        # 1. The file, then its record. A shared file system may show the folder late.
        _wait_until(self._find, min(self._timeout_s, _VISIBLE_WITHIN_S))
        temporary = self._temporary
        if temporary is None:
            raise CheckpointError(
                f"worker {self._worker} does not see a temporary folder in {self._folder}: worker 0 could not create "
                "it, or they do not share the folder. With a disk for each worker, save with worker=0, workers=1."
            )
        try:
            record = files.write_state(temporary / files.worker_file(self._worker), skeleton, tensors)
            write_atomically(self._record_path(self._worker), json.dumps(asdict(record)).encode())
        except Exception as error:
            if not temporary.is_dir():  # worker 0 has removed it, and this error only follows from that
                raise _cancelled() from error
            raise
        # 2. Worker 0 puts the checkpoint in place when all records are there; the others wait for that.
        if self._worker > 0:
            self._wait_for_commit(temporary, record)
            return
        write_atomically(temporary / files.MANIFEST, files.manifest(self.step, self._collect_records()))
        files.put_in_place(temporary, self.step)
        # 3. Worker 0 removes what is older than the last `keep` good checkpoints.
        kept = 0
        for each in reversed(checkpoints(self._folder)):
            if each.step <= self.step:  # later ones are damaged, and not ours to remove
                if kept >= self._keep:
                    files.discard(each.path)
                kept += each.good

    def _cancel(self) -> None:
        """After a failure: worker 0 removes the temporary folder, and another worker leaves an empty record there."""
        if self._temporary is None:
            return
        with suppress(OSError):
            if self._worker == 0:
                files.discard(self._temporary)
            else:
                self._record_path(self._worker).write_bytes(b"")

    def _record_path(self, worker: int) -> Path:
        assert self._temporary is not None
        return self._temporary / f"worker-{worker:05d}.json"

    def _collect_records(self) -> list[files.FileRecord]:
        """Wait for the records of all workers, and remove their files."""
        paths = [self._record_path(worker) for worker in range(self._workers)]

        def read() -> dict[int, str]:
            return {worker: path.read_text() for worker, path in enumerate(paths) if path.exists()}

        _wait_until(lambda: len(found := read()) == self._workers or "" in found.values(), self._timeout_s)
        found = read()
        if failed := [worker for worker, text in found.items() if not text]:
            raise CheckpointError(f"worker {failed[0]} could not write its file; its own error gives the reason.")
        if missing := sorted(set(range(self._workers)) - set(found)):
            raise CheckpointError(f"workers {missing} did not write their files within {self._timeout_s} s.")
        for path in paths:
            os.unlink(path)
        return [files.FileRecord(**json.loads(text)) for text in found.values()]

    def _wait_for_commit(self, temporary: Path, record: files.FileRecord) -> None:
        if not _wait_until(lambda: files.find_temporary(self._folder, self.step) != temporary, self._timeout_s):
            raise CheckpointError(f"worker 0 did not complete the checkpoint within {self._timeout_s} s.")
        with suppress(CheckpointError, OSError):
            if files.read_manifest(files.final_path(self._folder, self.step), self.step)[self._worker] == record:
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
