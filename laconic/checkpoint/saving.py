"""Save: every worker writes its file, and worker 0 puts the checkpoint in place when all have.

    worker 0       create .step-42.tmp │           │ write, wait for all parts, manifest, rename to step-42, prune
                                    barrier     barrier
    other workers                      │ find it   │ write, wait until .step-42.tmp is gone

The barrier is called twice, in the caller's thread. After that the workers coordinate through the folder alone, so the
rest can run in the background without interleaving with collectives.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist

from laconic.checkpoint.loading import StrPath, resolve_worker
from laconic.checkpoint.records import CheckpointError
from laconic.checkpoint.transaction import Contents, SaveTransaction
from laconic.checkpoint.tree import flatten, snapshot
from laconic.values import is_number, is_whole

logger = logging.getLogger("laconic.checkpoint")

Barrier: TypeAlias = Callable[[], object] | dist.ProcessGroup | None
Run: TypeAlias = Generator[None, Contents, None]


class Saving:
    """A save that is running or has ended. Waiting for it is optional: the next save does, and the interpreter."""

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

    With `wait=False` tensors are copied now and written in the background. A failure then does not stop the training:
    it is logged, and is `error` of the result. One save runs at a time: the next one waits for it.

    `worker` and `workers` default to those of torch.distributed, or 0 and 1 without it. `barrier`, a callable or a
    process group, makes the workers wait for each other; it is called twice, in this thread. `timeout_s` is how long a
    worker that has written its file waits for the others.
    """
    worker, workers = resolve_worker(worker, workers)
    _check("workers", workers, workers is not None, "given with worker, as in save(..., worker=0, workers=4)")
    _check("step", step, is_whole(step, 0) and step < 2**63, "a whole number from 0 up, such as session.step")
    _check("keep", keep, is_whole(keep), "a whole number from 1 up, such as 10**9 to keep all")
    _check("timeout_s", timeout_s, is_number(timeout_s) and timeout_s > 0, "a number of seconds above 0")
    call_barrier = _resolve_barrier(barrier, workers := workers or 1)
    key = (os.path.realpath(folder), worker)
    if key in _last:
        _last[key].wait()
    run = SaveTransaction(Path(folder), step, worker, workers, keep, timeout_s).run()
    saving, contents = Saving(step), _prepare(run, state, call_barrier, copy=not wait)
    if wait:
        _finish(saving, run, contents, folder)
        if saving.error is not None:
            raise saving.error
    else:
        _last[key] = saving
        threading.Thread(target=_finish, args=(saving, run, contents, folder), name=f"save step {step}").start()
    return saving


def _check(name: str, value: object, valid: bool, rule: str) -> None:
    if not valid:
        raise ValueError(f"save({name}={value!r}): {name} must be {rule}.")


def _resolve_barrier(barrier: Barrier, workers: int) -> Callable[[], object]:
    """Return the callable that waits for all workers."""
    if workers == 1:
        return lambda: None
    if callable(barrier):
        return barrier
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(barrier) != workers:
        raise ValueError(
            f"save(workers={workers}, barrier={barrier!r}): the workers must wait for each other. Give a process group "
            "of those that save, or a callable that returns when all have called it."
        )
    return lambda: dist.barrier(barrier)


def _prepare(run: Run, state: Any, call_barrier: Callable[[], object], copy: bool) -> Contents | Exception:
    """Do what the caller's thread must do; return what to write, or a problem with the disk or memory.

    A wrong `state` raises, but after the barriers, where the other workers wait.
    """
    problem: Exception | None = None
    try:
        next(run)
    except (OSError, CheckpointError) as error:
        problem = error
    try:
        call_barrier()
        next(run, None)
        call_barrier()
        skeleton, tensors = flatten(state)
    except BaseException as error:
        run.throw(error)  # rolls back
        raise
    try:
        return problem or (skeleton, {name: snapshot(t) for name, t in tensors.items()} if copy else tensors)
    except (RuntimeError, MemoryError) as error:
        return error


def _finish(saving: Saving, run: Run, contents: Contents | Exception, folder: StrPath) -> None:
    """Write the contents, in any thread."""
    try:
        with suppress(StopIteration):
            run.throw(contents) if isinstance(contents, Exception) else run.send(contents)
        logger.info("step %d is saved in %s", saving.step, folder)
    except BaseException as error:
        saving.error = CheckpointError(
            f"step {saving.step} was not saved in {folder}: {error}\n  The older checkpoints are as they were. "
            "The next save tries again; if the disk is full, free some space or keep fewer."
        )
        saving.error.__cause__ = error
        if not isinstance(error, Exception):
            raise
        logger.error("%s", saving.error)
        del contents  # the traceback would keep the copied tensors alive
        traceback.clear_frames(error.__traceback__)
    finally:
        saving._ended.set()
