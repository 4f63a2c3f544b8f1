"""The objects that make up a worker's state, and the errors that mean a lost worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic import LostWorkerError, Session
from laconic.elastic.snapshot import Stateful


def parts_of(
    session: Session, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], also: Mapping[str, Stateful] | None
) -> dict[str, Stateful]:
    """Name every object whose state belongs to a step, and make the session average weights in copies.

    A lost worker that continues may still write into buffers of a collective that the others have abandoned: these
    must not be the weights, which the others have restored from a snapshot by then.
    """
    _check_bare(session, model)
    session.commit = "atomic"
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    return {
        "model": model,
        **{f"optimizer {index}": each for index, each in enumerate(optimizers)},
        "session": session,
        **{f"also {name}": each for name, each in (also or {}).items()},
    }


def _check_bare(session: Session, model: nn.Module) -> None:
    """Refuse models that keep a process group, which is lost with its first worker."""
    wrapped = any(isinstance(each, DistributedDataParallel) for each in model.modules())
    if not wrapped and session.can_regroup:
        return
    raise ValueError(
        f"Run(model={type(model).__name__}): {'DistributedDataParallel' if wrapped else 'FSDP'} keeps the process "
        "group that it was made with, and an elastic run makes a new one whenever workers come or go. Leave the "
        "wrapper out and attach to the bare module: laconic.attach(laconic.ddp(), model, optimizer) averages the same "
        "gradients, at the optimizer's step."
    )


def is_loss(session: Session, error: BaseException) -> bool:
    """Return whether an error means that workers were lost, and is not the user's own."""
    return isinstance(error, LostWorkerError) or error is session.error
