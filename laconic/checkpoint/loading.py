"""Find the newest checkpoint that is undamaged, and read the state of a worker from it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from laconic.checkpoint.folder import complete, discard
from laconic.checkpoint.manifest import Manifest, check_file, read_manifest, worker_file
from laconic.checkpoint.records import Checkpoint, CheckpointError, Loaded
from laconic.checkpoint.worker_file import read_worker_file
from laconic.checkpoint.workers import resolve_worker

logger = logging.getLogger("laconic.checkpoint")

StrPath: TypeAlias = str | os.PathLike[str]
T = TypeVar("T")


def checkpoints(folder: StrPath) -> list[Checkpoint]:
    """List what is saved, oldest first, by manifests and file sizes only. `verify` reads every byte.

    >>> checkpoints("no-such-folder")
    []
    """
    return [_inspect(step, path, _check_sizes)[0] for step, path in complete(Path(folder)).items()]


def verify(folder: StrPath, *, after: int = -1) -> list[Checkpoint]:
    """Read every byte of the checkpoints later than step `after`, oldest first, and report which are good.

    Nothing is changed or removed.
    """
    found = complete(Path(folder)).items()
    return [_inspect(step, path, _check_all)[0] for step, path in found if step > after]


def load(
    folder: StrPath,
    *,
    step: int | None = None,
    worker: int | None = None,
    workers: int | None = None,
    check: Literal["all", "own"] = "all",
) -> Loaded:
    """Read the state of this worker from the newest good checkpoint, or from that of `step`.

        saved = checkpoint.load("checkpoints")
        model.load_state_dict(saved.state["model"])

    Tensors are on the CPU. A damaged checkpoint is skipped with a warning, and listed in `skipped` of the result. If
    `step` is damaged, or no checkpoint is good, that is a `CheckpointError`.

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
        inspected, result = _inspect(each, found[each], _reader(worker, workers, check))
        if isinstance(result, Loaded):
            return replace(result, skipped=tuple(skipped))
        if result is not None:
            raise CheckpointError(result, tuple(skipped))
        skipped.append(inspected)
        if step is None:
            logger.warning("%s is damaged and was skipped: %s", inspected.path, inspected.problem)
    problems = "".join(f"\n  step {each.step}: {each.problem}" for each in skipped) or " there is none."
    raise CheckpointError(
        f"load(step={step}): no good checkpoint in {place}:{problems}\n  Load another step, restore the folder from a "
        "copy, or start again; checkpoints(folder) is empty where nothing was saved.",
        tuple(skipped),
    )


def _found(folder: Path, step: int | None, caller: str) -> dict[int, Path]:
    """Return the checkpoints by step, and make sure that `step`, if given, is one of them."""
    found = complete(folder)
    if step is not None and step not in found:
        raise CheckpointError(f"{caller}(step={step}): {folder} has no such step. {_steps(found)}")
    return found


def _steps(found: dict[int, Path]) -> str:
    return f"It has the steps {', '.join(map(str, found))}." if found else "It has no checkpoint."


def _inspect(step: int, path: Path, read: Callable[[Path, Manifest], T]) -> tuple[Checkpoint, T | None]:
    """Read something from a checkpoint. If it is damaged, return None and the problem."""
    manifest = None
    try:
        manifest = read_manifest(path, step)
        return Checkpoint(step, path, manifest.workers), read(path, manifest)
    except (CheckpointError, OSError) as error:
        return Checkpoint(step, path, None if manifest is None else manifest.workers, str(error)), None


def _reader(
    worker: int, workers: int | None, check: str, *, discard_data: bool = False
) -> Callable[[Path, Manifest], Loaded | str]:
    """Return a function that reads a worker's state from a checkpoint, or returns why it does not fit the worker."""

    def read(path: Path, manifest: Manifest) -> Loaded | str:
        misfit = _misfit(path, manifest, worker, workers)
        _check_sizes(path, manifest)
        for name in map(worker_file, range(manifest.workers) if check == "all" else ()):
            if misfit or name != worker_file(worker):
                check_file(path / name, manifest.files[name])
        if misfit:
            return misfit
        state = _read_state(path, manifest, worker, discard_data=discard_data)
        return Loaded(state, manifest.step, worker, manifest.workers)

    return read


def _misfit(path: Path, manifest: Manifest, worker: int, workers: int | None) -> str:
    if workers is not None and workers != manifest.workers:
        return (
            f"{path} was saved by {manifest.workers} workers, and {workers} load it. Each worker has its own state: "
            f"load all, load(folder, worker=w) for w in range({manifest.workers}), and resize(states, {workers})."
        )
    if worker >= manifest.workers:
        return f"{path} was saved by {manifest.workers} workers, so it has no worker {worker}."
    return ""


def _check_sizes(path: Path, manifest: Manifest) -> None:
    for name, record in manifest.files.items():
        check_file(path / name, record, size_only=True)


def _check_all(path: Path, manifest: Manifest) -> None:
    for worker in range(manifest.workers):
        _read_state(path, manifest, worker, discard_data=True)


def _read_state(path: Path, manifest: Manifest, worker: int, *, discard_data: bool = False) -> Any:
    """Read a worker's file, after its digest was checked."""
    name = worker_file(worker)
    check_file(path / name, manifest.files[name])
    return read_worker_file(path / name, discard_data=discard_data)


def newest_common(folder: StrPath, *, worker: int | None = None, workers: int | None = None) -> int:
    """Find the newest step that is good on every worker of torch.distributed's default group. All workers call it.

        step = checkpoint.newest_common(folder)
        saved = checkpoint.load(folder, step=step, check="own")

    Each worker reads its own file only. So the workers may also have folders of their own, on their own disks, each
    saved as by a single worker: `newest_common(folder, worker=0, workers=1)`.
    """
    place, read = Path(folder), _reader(*resolve_worker(worker, workers), check="own", discard_data=True)
    found, limit = complete(place), 2**63 - 1

    def is_good(step: int) -> bool:
        inspected, result = _inspect(step, found[step], read)
        if not inspected.good:
            logger.warning("%s is damaged and was skipped: %s", inspected.path, inspected.problem)
        return isinstance(result, Loaded)

    while True:
        own = next((step for step in reversed(found) if step <= limit and is_good(step)), -1)
        lowest, highest = _minimum(own), -_minimum(-own)
        if lowest < 0:
            raise CheckpointError(f"newest_common: no step in {place} is good on every worker. {_steps(found)}")
        if lowest == highest:
            return lowest
        limit = lowest


def _minimum(value: int) -> int:
    """Return the smallest of the workers' values."""
    if not dist.is_available() or not dist.is_initialized():
        return value
    least = torch.tensor(value, dtype=torch.int64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


def rewind(folder: StrPath, step: int) -> list[Checkpoint]:
    """Remove all checkpoints later than `step`, so that training can continue from there, and return them.

    One worker calls it, before the others load.
    """
    target, _ = _inspect(step, _found(Path(folder), step, "rewind")[step], _check_all)
    if not target.good:
        raise CheckpointError(f"rewind(step={step}): {target.path} is damaged: {target.problem} Nothing was removed.")
    later = [each for each in checkpoints(folder) if each.step > step]
    for each in later:
        discard(each.path)
    return later
