"""Save: every worker writes its file, and worker 0 puts the checkpoint in place when all have.

    worker 0       create .step-42.tmp │           │ write, wait for all parts, manifest, rename to step-42, prune
                                    barrier     barrier
    other workers                      │ open it   │ write, wait until .step-42.tmp is gone

The barrier is called twice, in the caller's thread. After that the workers coordinate through the folder alone, so the
rest can run in the background without interleaving with collectives.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from laconic.checkpoint.loading import StrPath
from laconic.checkpoint.records import CheckpointError
from laconic.checkpoint.transaction import SaveTransaction
from laconic.checkpoint.tree import flatten, snapshot
from laconic.checkpoint.workers import Barrier, is_whole, resolve_barrier, resolve_worker

logger = logging.getLogger("laconic.checkpoint")


class Saving:
    """A save that is running or has ended.

    Waiting for it is optional: the next save does, and so does the interpreter at exit.
    """

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

    def __repr__(self) -> str:
        state = "running" if not self.ended else "in place" if self.error is None else "failed"
        return f"<Saving step {self.step}: {state}>"


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
    index, size = resolve_worker(worker, workers)
    if size is None:
        raise ValueError(f"save(worker={worker}): give the number of workers, as in save(..., worker=0, workers=4).")
    _check(step, keep, timeout_s)
    call_barrier = resolve_barrier(barrier, size)
    key = (os.path.realpath(folder), index)
    if key in _last:
        _last[key].wait()
    saving, transaction = Saving(step), SaveTransaction(Path(folder), step, index, size, keep, timeout_s)
    run = _run(saving, transaction, state, call_barrier, copy=not wait)
    next(run)
    if wait:
        _finish(run, saving)
        if saving.error is not None:
            raise saving.error
    else:
        _last[key] = saving
        threading.Thread(target=_finish, args=(run, saving), name=f"save step {step}").start()
    return saving


def _check(step: object, keep: object, timeout_s: object) -> None:
    if not is_whole(step, 0):
        raise ValueError(f"save(step={step!r}): step must be a whole number from 0 up, such as session.step.")
    if not is_whole(keep, 1):
        raise ValueError(f"save(keep={keep!r}): keep must be a whole number from 1 up. To keep all, use keep=10**9.")
    if type(timeout_s) not in (int, float) or not timeout_s > 0:  # type: ignore[operator]
        raise ValueError(f"save(timeout_s={timeout_s!r}): timeout_s must be a number of seconds above 0.")


def _run(
    saving: Saving, transaction: SaveTransaction, state: Any, call_barrier: Callable[[], object], copy: bool
) -> Iterator[None]:
    """Save in two parts: up to the yield in the caller's thread, the rest in any thread.

    A wrong `state` raises in the first part, but after the barriers, where the other workers wait. A problem with the
    disk raises in the second.
    """
    try:
        problem = transaction.begin()
        call_barrier()
        transaction.open_folder()
        call_barrier()
        skeleton, tensors = flatten(state)
        if copy and problem is None:
            try:
                tensors = {name: snapshot(t) for name, t in tensors.items()}
            except (RuntimeError, MemoryError) as error:
                problem = error
        yield
        if problem is not None:
            raise problem
        transaction.write(skeleton, tensors)
        logger.info("step %d is saved in %s by worker %d", saving.step, transaction.folder, transaction.worker)
    except BaseException as error:
        saving.error = CheckpointError(
            f"step {saving.step} was not saved in {transaction.folder}: {error}\n"
            "  The older checkpoints are as they were. The next save tries again; if the disk is full, free some space "
            "or keep fewer."
        )
        saving.error.__cause__ = error
        transaction.roll_back()
        raise
    finally:
        transaction.close()
        saving._ended.set()


def _finish(run: Iterator[None], saving: Saving) -> None:
    try:
        next(run, None)
    except Exception as error:
        logger.error("%s", saving.error)
        traceback.clear_frames(error.__traceback__)  # they would keep the copied tensors alive
