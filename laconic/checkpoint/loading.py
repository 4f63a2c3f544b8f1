"""Find the newest checkpoint that is undamaged, on one worker or on all, and read the state of a worker from it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from laconic.checkpoint.files import check_file, complete, discard, read_manifest, read_state, worker_file
from laconic.errors import CheckpointError
from laconic.values import is_whole

logger = logging.getLogger("laconic.checkpoint")

StrPath: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True)
class Checkpoint:
    """One saved step of all workers."""

    step: int
    path: Path
    workers: int | None = None
    """How many workers saved it; None if the manifest cannot be read."""
    problem: str = ""
    """What is wrong with it; empty if nothing is."""

    @property
    def good(self) -> bool:
        """Whether no problem was found."""
        return not self.problem


@dataclass(frozen=True)
class Loaded:
    """The state of one worker, as it was saved."""

    state: Any = field(repr=False)
    step: int
    worker: int
    workers: int
    """How many workers saved this checkpoint."""
    skipped: tuple[Checkpoint, ...] = ()
    """Newer checkpoints that were rejected, each with its problem."""


def checkpoints(folder: StrPath) -> list[Checkpoint]:
    """List what is saved, oldest first, by manifests and file sizes only. `verify` reads every byte.

    >>> checkpoints("no-such-folder")
    []
    """
    return [_inspect(step, path, "sizes")[0] for step, path in complete(Path(folder)).items()]


def verify(folder: StrPath, *, after: int = -1) -> list[Checkpoint]:
    """Read every byte of the checkpoints later than step `after`, oldest first, and report which are good."""
    return [_inspect(step, path, "all")[0] for step, path in complete(Path(folder)).items() if step > after]


def load(
    folder: StrPath,
    *,
    step: int | None = None,
    worker: int | None = None,
    workers: int | None = None,
    check: Literal["all", "own"] = "all",
) -> Loaded:
    """Read the state of this worker from the newest good checkpoint, or from that of `step`.

    Tensors are on the CPU. A damaged checkpoint is skipped with a warning, and listed in `skipped` of the result.

    `worker` and `workers` default to those of torch.distributed, or 0 and 1 without it. A checkpoint of another number
    of workers is refused, as each worker has its own state: load all of them, `load(folder, worker=w)`, and `resize`.

    Every worker checks the files of all workers, so that all choose the same checkpoint without communication. If that
    is too much to read, agree on a step first: `load(folder, step=newest_common(folder), check="own")`.
    """
    if check not in ("all", "own") or (check == "own" and step is None):
        raise ValueError(
            f'load(step={step}, check={check!r}): check must be "all", or "own" for a step that the workers have '
            "agreed on; otherwise they could choose different ones. newest_common(folder) finds such a step."
        )
    place, (worker, workers) = Path(folder), resolve_worker(worker, workers)
    found, skipped = _found(place, step, "load"), list[Checkpoint]()
    for each in reversed(found) if step is None else [step]:
        inspected, state = _inspect(each, found[each], check, own=worker)
        saved_by = inspected.workers or 0
        if inspected.good and (worker >= saved_by or workers not in (None, saved_by)):
            raise CheckpointError(
                f"load(worker={worker}, workers={workers}): {inspected.path} was saved by {saved_by} workers, and each "
                f"has its own state. Load all, load(folder, worker=w) for w in range({saved_by}), and resize them."
            )
        if inspected.good:
            return Loaded(state, each, worker, saved_by, tuple(skipped))
        skipped.append(inspected)
        if step is None:
            logger.warning("%s is damaged and was skipped: %s", inspected.path, inspected.problem)
    problems = "".join(f"\n  step {each.step}: {each.problem}" for each in skipped) or " there is none."
    raise CheckpointError(
        f"load(step={step}): no good checkpoint in {place}:{problems}\n  Load another step, restore the folder from a "
        "copy, or start again; checkpoints(folder) is empty where nothing was saved."
    )


def _found(folder: Path, step: int | None, caller: str) -> dict[int, Path]:
    """Return the checkpoints by step, of which `step` must be one."""
    found = complete(folder)
    if step is not None and step not in found:
        raise CheckpointError(f"{caller}(step={step}): {folder} has no such step, but {list(found)}.")
    return found


def _inspect(step: int, path: Path, check: str, own: int | None = None) -> tuple[Checkpoint, Any]:
    """Check the "sizes" of all files, and the contents of "all" or the "own" one. Return also the own state."""
    workers = state = None
    try:
        records = read_manifest(path, step)
        workers = len(records)
        for worker, record in enumerate(records):
            file = path / worker_file(worker)
            if worker == own:
                state = read_state(file, record)
            else:
                check_file(file, record, size_only=check != "all")
    except (CheckpointError, OSError) as error:
        return Checkpoint(step, path, workers, str(error)), None
    return Checkpoint(step, path, workers), state


def newest_common(folder: StrPath, *, worker: int | None = None, workers: int | None = None) -> int:
    """Find the newest step that is good on every worker of torch.distributed's default group. All workers call it.

    Each worker reads its own file only. So the workers may also have folders of their own, on their own disks, each
    saved as by a single worker: `newest_common(folder, worker=0, workers=1)`.
    """
    found, limit = complete(Path(folder)), 2**63 - 1

    def is_good(step: int) -> bool:
        try:
            load(folder, step=step, worker=worker, workers=workers, check="own")
        except CheckpointError as error:
            logger.warning("%s", error)
            return False
        return True

    while True:
        own = next((step for step in reversed(found) if step <= limit and is_good(step)), -1)
        lowest, highest = lowest_and_highest(own)
        if lowest < 0:
            raise CheckpointError(f"newest_common: no step in {folder}, of {list(found)}, is good on every worker.")
        if lowest == highest:
            return lowest
        limit = lowest


def rewind(folder: StrPath, step: int) -> list[Checkpoint]:
    """Remove all checkpoints later than `step`, so that training can continue from there, and return them.

    One worker calls it, before the others load.
    """
    target, _ = _inspect(step, _found(Path(folder), step, "rewind")[step], "all")
    if not target.good:
        raise CheckpointError(f"rewind(step={step}): {target.path} is damaged: {target.problem} Nothing was removed.")
    later = [each for each in checkpoints(folder) if each.step > step]
    for each in later:
        discard(each.path)
    return later


def resolve_worker(worker: int | None, workers: int | None) -> tuple[int, int | None]:
    """Check the index of a worker; by default it is the rank in torch.distributed, or 0 of 1."""
    if worker is None and workers is None:
        return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
    if worker is None or not is_whole(worker, 0) or not (workers is None or is_whole(workers, worker + 1)):
        raise ValueError(f"worker={worker!r}, workers={workers!r}: give whole numbers, such as worker=0, workers=4.")
    return worker, workers


def is_distributed() -> bool:
    """Return whether torch.distributed has a default group."""
    return dist.is_available() and dist.is_initialized()


def lowest_and_highest(value: int) -> tuple[int, int]:
    """Compare a value with those of the other workers."""
    if not is_distributed():
        return value, value
    ends = torch.tensor([value, -value], device=wire_device())
    dist.all_reduce(ends, dist.ReduceOp.MIN)
    return int(ends[0]), -int(ends[1])


def wire_device() -> torch.device:
    """Return where tensors must be that travel in the default group: on the CPU, if one of its backends serves it."""
    has_cpu = "cpu:" in dist.get_backend_config()  # such as "cpu:gloo,cuda:nccl"
    return torch.device("cpu" if has_cpu else "cuda")
