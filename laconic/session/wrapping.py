"""Refuse models that somebody else averages too: DDP around or inside them, another session, or no process group."""

from __future__ import annotations

import gc
import os
import weakref
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.comm.groups import Levels
from laconic.session.ddp import find_ddp
from laconic.torch_private.modules import ddp_models_of

if TYPE_CHECKING:
    from laconic.session.session import Session

_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
"""Sessions that are attached."""


def check_wrapping(model: nn.Module) -> None:
    """Refuse a model that somebody else averages besides, or that has a session already."""
    if any(type(module).__name__ == "DeepSpeedEngine" for module in model.modules()):
        raise ValueError(
            "attach: DeepSpeedEngine averages gradients itself, in every step. Train a DDP model, one that FSDP2 "
            "shards, or a bare module."
        )
    if find_ddp(model) is None:
        check_ddp(model)
    ours = {id(p) for p in model.parameters()}
    if _is_attached(ours):
        gc.collect()  # the session may be garbage
        if _is_attached(ours):
            raise RuntimeError(
                "attach: this model has a session already, and two would average it twice. Call session.detach() on "
                "the first; to go on with another plan, call session.change(plan)."
            )


def check_ddp(model: nn.Module) -> None:
    """Refuse a bare module that DDP wraps, or that contains a DDP model: DDP would go on averaging."""
    kind = type(model).__name__
    inside = [name for name, module in model.named_modules() if isinstance(module, DistributedDataParallel)]
    if inside:
        raise ValueError(
            f"attach: {kind} hides a DistributedDataParallel, {inside[0]!r}, which averages in every step besides. "
            f"Attach to that DDP model: attach(plan, model.{inside[0]}, optimizer). Or make {kind} without it."
        )
    if ddp_models_of({id(p) for p in model.parameters()}):
        raise ValueError(
            f"attach: a DistributedDataParallel holds the parameters of this {kind}, and averages in every step "
            "besides. Attach to the DDP model itself: attach(plan, ddp_model, optimizer), after it is made. It is what "
            "accelerator.prepare() or fabric.setup() returned, trainer.model_wrapped in transformers, and "
            "trainer.strategy.model in Lightning. If it is not used, delete it."
        )


def check_first_step(bare: nn.Module | None, levels: Levels) -> None:
    """Refuse a bare module that DDP wraps by now, and a worker that trains alone where there are others."""
    if bare is not None:
        check_ddp(bare)
    if levels.world.group is not None:
        return
    workers = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE") or 1)
    if workers > 1:
        raise RuntimeError(
            f"this worker is one of {workers} and was attached alone: torch.distributed was not initialised at attach. "
            "Call torch.distributed.init_process_group() before attach(). To train alone on purpose, unset WORLD_SIZE."
        )


def remember(session: Session) -> None:
    """Note that a session is attached."""
    _sessions.add(session)


def _is_attached(parameters: set[int]) -> bool:
    return any(
        session.attached and any(id(p) in parameters for p in session.parameters.values()) for session in _sessions
    )
