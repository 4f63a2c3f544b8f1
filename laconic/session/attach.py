"""What is settled before the first step: who the workers are, whether they mean the same, and where they start."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.checks.agreement import DisagreementError, parameter_facts
from laconic.checks.finite import different
from laconic.comm.groups import Given, whole_of
from laconic.plans.plan import Plan
from laconic.session.model_state import ModelState

logger = logging.getLogger(__name__)


def check_arguments(plan: Plan, model: nn.Module, optimizers: list[Optimizer]) -> None:
    """Refuse what cannot be attached."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"attach({plan!r}, ...): the first argument is a Plan, such as laconic.power_sgd(rank=4). "
            "From text: laconic.plan('power_sgd(rank=4)')."
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"attach(plan, {type(model).__name__}, ...): the second argument is the model, a torch.nn.Module."
        )
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        raise TypeError(
            "attach(plan, model, optimizer): a torch.optim.Optimizer is needed, or several in a list, "
            f"not {[type(each).__name__ for each in optimizers]}."
        )
    ours = {id(p) for p in model.parameters()}
    for each in optimizers:
        if not any(id(p) in ours for group in each.param_groups for p in group["params"]):
            raise ValueError(
                f"attach: {type(each).__name__} holds none of the model's parameters: its steps are not the model's. "
                "Make the optimizer from model.parameters(), after moving the model to its device."
            )


def group_of(
    ddp: DistributedDataParallel | None, group: dist.ProcessGroup | None, levels: Given | None
) -> dist.ProcessGroup | None:
    """Find the workers that agree."""
    if group is not None:
        return group
    if ddp is not None:
        found: dist.ProcessGroup = ddp.process_group
        return found
    if levels is not None:
        return whole_of(levels)
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def handshake_facts(plan: Plan, model_state: ModelState, model: nn.Module, commit: str) -> dict[str, object]:
    """State what all workers must have alike."""
    from laconic import __version__

    facts: dict[str, object] = {"laconic": __version__, "torch": torch.__version__}
    facts |= {"plan": repr(plan), "commit": commit}
    facts |= parameter_facts(model.named_parameters())
    return facts | {name: f"{list(b.shape)} {b.dtype}" for name, b in model_state.all_buffers.items()}


def sync_initial_weights(model_state: ModelState, sync_initial: bool | None, bare: bool) -> None:
    """Find out whether all workers start from the same weights, and give them the first worker's if asked."""
    found = different(model_state.queue, model_state.params)
    if found is not None and sync_initial is not True:
        odd, name = found
        text = f"attach: the first weights of workers {odd} are not those of the others, first in {name}"
        if sync_initial is False:
            raise DisagreementError(f"{text}. Seed all workers alike, or attach with sync_initial=True.")
        done = "All now have worker 0's." if bare else "They stay so: sync_initial=True would mend it."
        logger.warning("%s. %s", text, done)
    if sync_initial or (bare and sync_initial is None):
        model_state.broadcast()
