"""Each worker's own state, in a file beside what a framework saves.

Frameworks save the model and the optimizer of the first worker alone. With laconic, every worker has state of its own:
residuals and, where a plan takes local steps, weights and moments that differ until the next synchronisation. So each
worker writes `laconic_<rank>.safetensors` into the folder of the framework's checkpoint. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from laconic import Session
from laconic.checkpoint.files import read_state, write_state
from laconic.checkpoint.loading import StrPath, lowest_and_highest, resolve_worker
from laconic.checkpoint.resizing import resize as resize_states
from laconic.checkpoint.state import flatten
from laconic.errors import CheckpointError

FORMAT = "laconic worker 1"
Resize: TypeAlias = Literal["sum", "mean"]
"""What residuals keep when another number of workers goes on: see `laconic.checkpoint.resize`."""


def file_name(worker: int, name: str = "laconic") -> str:
    """Return the name of a worker's file."""
    return f"{name}_{worker}.safetensors"


def check_can_save(session: Session) -> None:
    """Refuse what a framework's checkpoint cannot hold: different steps, and shards that local steps make different."""
    session.plan.check_by_steps("The checkpoint of a framework")
    if session.plan.local and any(isinstance(p, DTensor) for p in session.parameters.values()):
        raise ValueError(
            f"{session.plan!r} on a sharded model: between two synchronisations the replicas of a shard differ, and a "
            "framework's checkpoint holds one of them. Use a plan that averages gradients, such as power_sgd(), or "
            "save every replica with laconic.checkpoint."
        )


def save(folder: StrPath, session: Session, name: str = "laconic") -> None:
    """Write this worker's file. Every worker calls it at the same step; on return all have written theirs."""
    check_can_save(session)
    _together("save", lambda: save_own(Path(folder), session, name), lambda _: session.step)


def save_own(folder: Path, session: Session, name: str = "laconic") -> None:
    """Write this worker's file. The other workers need not call it."""
    worker, workers = resolve_worker(None, None)
    state: dict[str, Any] = {"format": FORMAT, "worker": worker, "workers": workers, "session": session.state_dict()}
    if session.plan.local and worker > 0:  # the framework saves those of worker 0
        moments = [optimizer.state_dict() for optimizer in session.optimizers]
        state["own"] = {"tensors": _tensors(session), "optimizers": moments}
    folder.mkdir(parents=True, exist_ok=True)  # a worker may come before the first, which makes it
    write_state(folder / file_name(worker, name), *flatten(state))


def check_resize(call: str, resize: object) -> None:
    """Refuse what is none of the ways to divide residuals among another number of workers."""
    if resize not in ("sum", "mean", None):
        raise ValueError(f'{call}(resize={resize!r}): resize must be "sum", "mean" or None.')


def load(
    folder: StrPath,
    session: Session,
    without: str,
    name: str = "laconic",
    *,
    resize: Resize | None = None,
    resizing: str = "",
) -> dict[str, Any]:
    """Read this worker's file, and let the session go on from it. Every worker calls it.

    The result has "own" where this worker's weights and moments are not those of worker 0: `restore_own` sets them.
    With `resize`, another number of workers may have saved: see `laconic.checkpoint.resize`. `without` and `resizing`
    tell in errors how to go on without such files, and among other workers.
    """

    def read() -> dict[str, Any]:
        try:
            return _read(Path(folder), name, resize, resizing)
        except (OSError, CheckpointError) as error:
            way_out = f"To go on from the model and the optimizer alone, with residuals of zero, {without}."
            raise CheckpointError(f"{error} {way_out}") from error

    state: dict[str, Any] = _together("load", read, lambda found: int(found["session"]["step"]))
    session.load_state_dict(state["session"])
    return state


def restore_own(session: Session, state: dict[str, Any]) -> None:
    """Set the weights and moments of this worker, after the framework has loaded those of worker 0."""
    if "own" in state:
        set_own(_tensors(session), session.optimizers, state["own"])


def set_own(tensors: Mapping[str, Tensor], optimizers: Iterable[Optimizer], own: Mapping[str, Any]) -> None:
    """Set a worker's weights and moments. What `own` does not hold stays as the framework has loaded it."""
    with torch.no_grad():
        for name, saved in own.get("tensors", {}).items():
            tensors[name].copy_(saved)
    for optimizer, saved in zip(optimizers, own.get("optimizers", ()), strict=False):
        optimizer.load_state_dict(saved)


def _tensors(session: Session) -> dict[str, Tensor]:
    return {**session.parameters, **session.buffers}


def _read(folder: Path, name: str, resize: Resize | None, resizing: str) -> dict[str, Any]:
    worker, workers = resolve_worker(None, None)
    assert workers is not None  # it was asked for without one
    files = len(list(folder.glob(f"{name}_*.safetensors")))
    if not files:
        missing = file_name(worker, name)
        raise CheckpointError(f"{folder} has no {missing}: it was saved without laconic, or under another name.")
    state = _read_worker(folder, worker, name) if (folder / file_name(worker, name)).exists() else None
    saved_by: int = files if state is None else state["workers"]
    if state is not None and saved_by == workers:
        return state
    if resize is None:
        divide = f", or divide what they have not sent yet among those that are there: {resizing}" if resizing else ""
        raise CheckpointError(
            f"{folder} was saved by {saved_by} workers, and there are {workers}: each worker has state of its own. "
            f"Start {saved_by} workers{divide}."
        )
    states = [_read_worker(folder, each, name) for each in range(saved_by)]
    sessions = resize_states([each["session"] for each in states], workers, conserve=resize)
    return {**(states[worker] if worker < saved_by else {}), "session": sessions[worker]}


def _read_worker(folder: Path, worker: int, name: str) -> dict[str, Any]:
    path = folder / file_name(worker, name)
    state = read_state(path)
    if not isinstance(state, dict) or state.get("format") != FORMAT or state.get("worker") != worker:
        raise CheckpointError(f"{path} is not what worker {worker} saves with this version of laconic.")
    return state


def _together(verb: str, act: Callable[[], Any], step_of: Callable[[Any], int]) -> Any:
    """Act on every worker; raise on all of them if one fails, or if they are not at the same step."""
    result, error = None, None
    try:
        result = act()
    except (OSError, CheckpointError, SafetensorError, TypeError) as found:
        error = found
    lowest, highest = lowest_and_highest(-1 if error is not None else step_of(result))
    if error is not None:
        raise error
    if lowest < 0:
        raise CheckpointError(f"another worker could not {verb} its state; its own error gives the reason.")
    if lowest < highest:
        raise CheckpointError(
            f"the workers' files are of steps {lowest} to {highest}: they belong to different checkpoints, of which "
            "one was not completed. Load an older checkpoint, and let all workers save at the same step."
        )
    return result
