"""Finding the newest generation that can be trusted, and reading a worker's state from it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from laconic.checkpoint.files import check_digest, check_size, opened, parse_json, read_small, size_of
from laconic.checkpoint.folder import discard, in_place
from laconic.checkpoint.generation import CheckpointError, Generation, Loaded
from laconic.checkpoint.manifest import Manifest, files_of, read_manifest
from laconic.checkpoint.nest import decode
from laconic.checkpoint.seat import seat_of
from laconic.checkpoint.tensors import TensorFile

logger = logging.getLogger("laconic.checkpoint")

Place: TypeAlias = str | os.PathLike[str]


def generations(folder: Place) -> list[Generation]:
    """List what is saved, oldest first: a quick look at manifests and sizes. `verify` reads every byte.

    >>> generations("no-such-folder")
    []
    """
    return [_looked_at(step, path, _check_sizes) for step, path in in_place(Path(folder)).items()]


def verify(folder: Place) -> list[Generation]:
    """Read every byte of every generation, oldest first, and tell of each whether it is good.

        for generation in verify("checkpoints"):
            print(generation.step, generation.problem or "good")

    Nothing is changed or removed.
    """
    return [_looked_at(step, path, check_all) for step, path in in_place(Path(folder)).items()]


def load(
    folder: Place,
    *,
    step: int | None = None,
    worker: int | None = None,
    workers: int | None = None,
    check: Literal["all", "own"] = "all",
) -> Loaded:
    """Read this worker's state from the newest good generation, or from that of `step`.

        saved = checkpoint.load("checkpoints")
        model.load_state_dict(saved.state["model"])

    A damaged generation is passed over with a warning, and is in `skipped` of what is returned; if it was asked for, or
    if none is good, that is a `CheckpointError`. Tensors come to the CPU.

    `worker` and `workers` are those of torch.distributed, or 0 and 1 without it. A generation of another number of
    workers is refused, as each has a state of its own: read all, `load(folder, worker=w)` for each `w`, and `resize`.

    Every worker checks the files of all, so that all come to the same generation without a word. Where that is too much
    to read, agree on a step first: `load(folder, step=newest_common(folder), check="own")`.
    """
    if check not in ("all", "own") or (check == "own" and step is None):
        raise ValueError(
            f'load(step={step}, check={check!r}): check is "all", or "own" for a step that the workers have agreed on, '
            "or they might take different ones. newest_common(folder) finds such a step."
        )
    place, (mine, size) = Path(folder), seat_of(worker, workers)
    found = in_place(place)
    if step is not None:
        return _load_asked(place, found, step, mine, size, check)
    skipped: list[Generation] = []
    for each, path in reversed(found.items()):
        manifest = None
        try:
            manifest = read_manifest(path, each)
            fits = _misfit(path, manifest, mine, size) is None
            _check_files(path, manifest, [w for w in range(manifest.workers) if w != mine or not fits])
            if fits:
                return Loaded(_read_state(path, manifest, mine), each, mine, manifest.workers, tuple(skipped))
        except CheckpointError as error:
            skipped.append(_bad(each, path, manifest, error))
            logger.warning("%s cannot be trusted and is passed over: %s", path, error)
            continue
        raise CheckpointError(str(_misfit(path, manifest, mine, size)), tuple(skipped))
    raise _none_good(place, skipped)


def _load_asked(place: Path, found: dict[int, Path], step: int, worker: int, workers: int | None, check: str) -> Loaded:
    if step not in found:
        raise CheckpointError(f"load(step={step}): {place} has no such step. {_steps(found)}")
    path = found[step]
    try:
        manifest = read_manifest(path, step)
        misfit = _misfit(path, manifest, worker, workers)
        if misfit is None:
            _check_files(path, manifest, [w for w in range(manifest.workers) if w != worker and check == "all"])
            return Loaded(_read_state(path, manifest, worker), step, worker, manifest.workers)
    except CheckpointError as error:
        raise CheckpointError(
            f"load(step={step}): {path} cannot be trusted: {error}\n"
            "  Load without a step to take the newest good generation; verify(folder) tells which are."
        ) from error
    raise CheckpointError(misfit)


def _none_good(place: Path, skipped: list[Generation]) -> CheckpointError:
    if not skipped:
        return CheckpointError(
            f"load: {place} has no checkpoint. To begin anew where there is none, ask generations(folder) first."
        )
    reasons = "".join(f"\n  step {each.step}: {each.problem}" for each in skipped)
    return CheckpointError(
        f"load: none of the {len(skipped)} generations in {place} can be trusted.{reasons}\n"
        "  Restore the folder from a copy, or begin anew in another one.",
        tuple(skipped),
    )


def _misfit(path: Path, manifest: Manifest, worker: int, workers: int | None) -> str | None:
    """Say why a generation, good or not, is not for this worker of so many; None if it is."""
    if workers is not None and workers != manifest.workers:
        return (
            f"{path} was saved by {manifest.workers} workers, and {workers} load it. Each has a state of its own: read "
            f"all, load(folder, worker=w) for w in range({manifest.workers}), and resize(states, workers={workers})."
        )
    if worker >= manifest.workers:
        return f"{path} was saved by {manifest.workers} workers, so it has no worker {worker}."
    return None


Check: TypeAlias = Callable[[Path, Manifest], None]


def _looked_at(step: int, path: Path, check: Check) -> Generation:
    manifest = None
    try:
        manifest = read_manifest(path, step)
        check(path, manifest)
    except CheckpointError as error:
        return _bad(step, path, manifest, error)
    return Generation(step, path, manifest.workers)


def _bad(step: int, path: Path, manifest: Manifest | None, error: CheckpointError) -> Generation:
    return Generation(step, path, None if manifest is None else manifest.workers, str(error))


def _check_sizes(path: Path, manifest: Manifest) -> None:
    for name, facts in manifest.files.items():
        check_size(path / name, size_of(path / name), facts)


def check_all(path: Path, manifest: Manifest) -> None:
    """Make sure that every file is what was saved, and that every state can be read from it."""
    for worker in range(manifest.workers):
        _read_state(path, manifest, worker, skip_data=True)


def _check_files(path: Path, manifest: Manifest, workers: list[int]) -> None:
    _check_sizes(path, manifest)  # of all workers: it costs nothing
    for name in (name for worker in workers for name in files_of(worker)):
        with opened(path / name) as file:
            check_digest(file, path / name, manifest.files[name])


def _read_state(path: Path, manifest: Manifest, worker: int, skip_data: bool = False) -> Any:
    """Read a worker's nest. Its files' digests are checked before anything in them is looked at."""
    tree_path, tensors_path = (path / name for name in files_of(worker))
    with opened(tree_path) as tree_file, opened(tensors_path) as tensors_file:
        for file, each in ((tree_file, tree_path), (tensors_file, tensors_path)):
            check_digest(file, each, manifest.files[each.name])
        tree = parse_json(read_small(tree_file, tree_path), tree_path.name)
        tensors = TensorFile(tensors_file, tensors_path)
        try:
            state = decode(tree, tensors.skip if skip_data else tensors.take)
            tensors.finish()
        except CheckpointError as error:
            raise CheckpointError(f"the state of worker {worker} cannot be read: {error}") from error
    return state


def newest_common(folder: Place, *, worker: int | None = None, workers: int | None = None) -> int:
    """Find the newest step that is good for every worker of torch.distributed's group; all of them call it.

        step = checkpoint.newest_common(folder)
        saved = checkpoint.load(folder, step=step, check="own")

    Each worker reads only its own files. So it also serves where workers have folders of their own, on their own disks,
    each saved as by a single worker: `newest_common(folder, worker=0, workers=1)`.
    """
    place, (mine, size) = Path(folder), seat_of(worker, workers)
    found = in_place(place)
    below = 2**63 - 1
    while True:
        here = next((step for step in reversed(found) if step <= below and _own_good(found, step, mine, size)), -1)
        step = _least(here)
        if step < 0:
            raise CheckpointError(f"newest_common: no step in {place} is good for every worker. {_steps(found)}")
        if _least(int(_own_good(found, step, mine, size))):
            return step
        below = step - 1


def _own_good(found: dict[int, Path], step: int, worker: int, workers: int | None) -> bool:
    try:
        manifest = read_manifest(found[step], step)
        if _misfit(found[step], manifest, worker, workers):
            return False
        _read_state(found[step], manifest, worker, skip_data=True)
    except KeyError:
        return False
    except CheckpointError as error:
        logger.warning("%s cannot be trusted and is passed over: %s", found[step], error)
        return False
    return True


def _least(value: int) -> int:
    """Return the smallest of the workers' values."""
    if not dist.is_available() or not dist.is_initialized():
        return value
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    least = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


def _steps(found: dict[int, Path]) -> str:
    return f"It has the steps {', '.join(map(str, found))}." if found else "It has no checkpoint."


def rewind(folder: Place, step: int) -> list[Generation]:
    """Remove all generations later than that of `step`, so that training can go on from there; tell which.

        checkpoint.rewind("checkpoints", step=4000)

    One worker does it, before the others load.
    """
    place = Path(folder)
    found = in_place(place)
    if step not in found:
        raise CheckpointError(f"rewind(step={step}): {place} has no such step. {_steps(found)}")
    kept = _looked_at(step, found[step], check_all)
    if not kept.good:
        raise CheckpointError(
            f"rewind(step={step}): {kept.path} cannot be trusted: {kept.problem} Nothing was removed."
        )
    later = [_looked_at(each, path, _check_sizes) for each, path in found.items() if each > step]
    for generation in later:
        discard(generation.path)
    return later


def later_than(folder: Path, step: int) -> list[Generation]:
    """Good generations of later steps, oldest first."""
    looked = [_looked_at(each, path, check_all) for each, path in in_place(folder).items() if each > step]
    return [generation for generation in looked if generation.good]
