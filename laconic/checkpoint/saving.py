"""Saving: every worker writes its part, and one of them puts the generation in place when all have.

    worker 0       make .step-42.tmp │         │ write, wait for all parts, manifest, rename to step-42, prune
                                  barrier   barrier
    other workers                    │ look    │ write, wait until .step-42.tmp is gone

The barrier is called twice, in the caller's thread. After it the workers meet through the folder alone, so that the
rest may run in the background without coming between collectives.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from laconic.checkpoint.attempt import Attempt
from laconic.checkpoint.generation import CheckpointError
from laconic.checkpoint.loading import Place
from laconic.checkpoint.nest import encode
from laconic.checkpoint.seat import Barrier, meeting, seat_of
from laconic.checkpoint.tensors import snapshot

logger = logging.getLogger("laconic.checkpoint")


class Saving:
    """A save that is under way, or has ended.

        saving = checkpoint.save(folder, state, step=100, wait=False)
        ...  # training goes on
        if not saving.wait():
            print(saving.error)

    It need not be waited for: the next save does, and so does the end of the program.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.error: CheckpointError | None = None
        """Why it failed, once it has ended; None if it is in place."""
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        """Whether it is over, well or not."""
        return self._ended.is_set()

    def wait(self) -> bool:
        """Wait for its end, and tell whether the generation is in place."""
        self._ended.wait()
        return self.error is None

    def __repr__(self) -> str:
        state = "under way" if not self.ended else "in place" if self.error is None else "failed"
        return f"<Saving step {self.step}: {state}>"


_last: dict[tuple[str, int], Saving] = {}
"""The last save in the background of each folder and worker, so that one is in flight at a time."""


def save(
    folder: Place,
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
    """Save this worker's state as its part of the generation `step`; every worker calls it at the same step.

        checkpoint.save("checkpoints", {"talk": talk.state_dict(), "model": model.state_dict()}, step=talk.step)

    `state` is a nest of dicts, lists, tuples, tensors, numbers, strings, bools and None. The generation appears, whole,
    when all workers have written theirs; the last `keep` good ones stay. A failure, such as a full disk, is a
    `CheckpointError`, and leaves everything as it was.

    With `wait=False` tensors are copied now and written in the background. Failures then do not stop the training: they
    are logged, and are in `error` of what is returned. One save is in flight at a time: the next one waits for it.

    `worker` and `workers` are those of torch.distributed, or 0 and 1 without it. `barrier` is how workers wait for each
    other: a callable, or a process group; it is called twice, now. Workers share `folder`. `timeout_s` is how long a
    worker that has written its part waits for the others.
    """
    mine, size = seat_of(worker, workers)
    if size is None:
        raise ValueError(f"save(worker={worker}): say of how many, such as save(..., worker={worker}, workers=4).")
    _check(step, keep, timeout_s)
    meet = meeting(barrier, size)
    key = (os.path.realpath(folder), mine)
    if key in _last:
        _last[key].wait()
    attempt = Attempt(Path(folder), step, mine, size, keep, timeout_s)
    saving = Saving(step)
    try:
        run = _begin(attempt, state, meet, copy=not wait)
    except BaseException as error:
        _end(attempt, saving, error)
        raise
    if wait:
        _finish(attempt, saving, run)
        if saving.error is not None:
            raise saving.error
    else:
        _last[key] = saving
        threading.Thread(target=_finish_quietly, args=(attempt, saving, run), name=f"saving step {step}").start()
    return saving


def _check(step: object, keep: object, timeout_s: object) -> None:
    if type(step) is not int or not 0 <= step < 2**63:
        raise ValueError(f"save(step={step!r}): step must be a whole number from 0 up, such as talk.step.")
    if type(keep) is not int or keep < 1:
        raise ValueError(f"save(keep={keep!r}): keep must be a whole number from 1 up. To keep all, use keep=10**9.")
    if type(timeout_s) not in (int, float) or not timeout_s > 0:  # type: ignore[operator]
        raise ValueError(f"save(timeout_s={timeout_s!r}): timeout_s must be a number of seconds above 0.")


def _begin(attempt: Attempt, state: Any, meet: Callable[[], object], copy: bool) -> Callable[[], None]:
    """Do what must be done in the caller's thread, and return the rest.

    What is wrong with the disk is part of the rest. What is wrong with the call raises here, but only after the
    barrier, where the other workers would wait for ever.
    """
    problem: Exception | None = None
    try:
        attempt.begin()
    except (OSError, CheckpointError) as error:
        problem = error
    meet()
    attempt.look()
    meet()
    tensors: dict[str, Tensor] = {}
    tree = encode(state, tensors)
    if problem is None and copy:
        try:
            tensors = {name: snapshot(t) for name, t in tensors.items()}
        except (RuntimeError, MemoryError) as error:
            problem = error

    def rest() -> None:
        if problem is not None:
            raise problem
        attempt.run(tree, tensors)

    return rest


def _finish(attempt: Attempt, saving: Saving, run: Callable[[], None]) -> None:
    try:
        run()
    except BaseException as error:
        logger.error("%s", _as_checkpoint_error(attempt, error))
        _end(attempt, saving, error)
        if not isinstance(error, Exception):  # Ctrl-C
            raise
    else:
        logger.info(
            "step %d is saved in %s, by worker %d of %d", saving.step, attempt.folder, attempt.worker, attempt.workers
        )
        _end(attempt, saving, None)


def _finish_quietly(attempt: Attempt, saving: Saving, run: Callable[[], None]) -> None:
    _finish(attempt, saving, run)
    error: BaseException | None = saving.error
    while error is not None:  # an error remembers its frames, and they the copied tensors
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _end(attempt: Attempt, saving: Saving, error: BaseException | None) -> None:
    try:
        if error is not None:
            saving.error = _as_checkpoint_error(attempt, error)
            attempt.give_up()
    finally:  # also if Ctrl-C comes a second time: the next save waits for this
        attempt.end()
        saving._ended.set()


def _as_checkpoint_error(attempt: Attempt, error: BaseException) -> CheckpointError:
    cause = error.__cause__ if isinstance(error, CheckpointError) else error
    full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
    way_out = "Make room, or keep fewer: the next save tries again." if full else "The next save tries again."
    wrapped = CheckpointError(
        f"step {attempt.step} was not saved in {attempt.folder}: {error}\n"
        f"  What was saved before is as it was. {way_out}"
    )
    wrapped.__cause__ = error
    return wrapped
