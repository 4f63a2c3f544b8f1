"""What belongs to a worker's state in an elastic run, and what cannot be run so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.comm.timeout import LostWorkerError
from laconic.elastic.snapshot import Stateful
from laconic.session.session import Session


def parts_of(
    session: Session, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], also: Mapping[str, Stateful] | None
) -> dict[str, Stateful]:
    """Name all that has a state that belongs to a step.

    From now on rounds of weights are averaged in copies. What a worker that was given up says when it wakes may still
    be written where it was expected, and weights have been taken back from the last committed round by then.
    """
    check_bare(session, model)
    session._weight_sync.commit = "atomic"
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    return {
        "model": model,
        **{f"optimizer {index}": each for index, each in enumerate(optimizers)},
        "session": session,
        **{f"also {name}": each for name, each in (also or {}).items()},
    }


def check_bare(session: Session, model: nn.Module) -> None:
    """Refuse models that are bound to a process group: theirs would be left with the first worker that is lost."""
    bound = next((each for each in model.modules() if isinstance(each, DistributedDataParallel)), None)
    if bound is None and session._dispatcher is None:
        return
    what = "DistributedDataParallel" if bound is not None else "FSDP"
    raise ValueError(
        f"Run(model={type(model).__name__}): {what} keeps the process group that it was made with, and an elastic run "
        "makes a new one whenever workers come or go. Leave the wrapper out and attach to the bare module: "
        "laconic.attach(laconic.ddp(), model, optimizer) averages the same gradients, at the optimizer's step."
    )


def is_loss(session: Session, error: BaseException) -> bool:
    """Whether an error tells of workers that were lost, and is not the caller's own."""
    return isinstance(error, LostWorkerError) or error is session._levels.world.broken


def check_counts(**given: int | None) -> None:
    """Refuse what is not a number of rounds."""
    for word, value in given.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"Run({word}={value!r}): {word} must be a whole number of rounds from 1 up.")
