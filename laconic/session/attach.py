"""Attach a plan to a model and its optimizers: check, build, and install the hooks last."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.checks.agreement import agree, parameter_facts
from laconic.checks.divergence import DivergenceCheck, first_difference
from laconic.checks.errors import DisagreementError
from laconic.checks.finite import NonFinite, NonFiniteCheck
from laconic.comm.groups import Given, Levels, whole_of
from laconic.comm.queue import CollectiveQueue
from laconic.ledger import Ledger
from laconic.plans.plan import Plan
from laconic.session.ddp import DDPPath, find_ddp
from laconic.session.fsdp import ShardedPath, check_sharded, replicas_of
from laconic.session.grad_scaler import ScaledSteps, skips_itself
from laconic.session.gradients import GradientAverager, GradientPath
from laconic.session.model_state import ModelState
from laconic.session.module import ModulePath
from laconic.session.observers import observers_from_env
from laconic.session.session import Session
from laconic.session.steps import Steps
from laconic.session.stop import StepHeaders, Stop
from laconic.session.weights import Anchors, Commit, WeightSync
from laconic.torch_private.fsdp import find_units

logger = logging.getLogger(__name__)


def attach(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    group: dist.ProcessGroup | None = None,
    levels: Given | None = None,
    ledger: Ledger | None = None,
    commit: Commit = "streaming",
    anchors: Anchors = "device",
    timeout_s: float | None = None,
    sync_initial: bool | None = None,
    nonfinite: NonFinite | None = None,
    verify_every: int | None = None,
    compress_alone: bool = False,
) -> Session:
    """Synchronise the workers that hold copies of `model` as `plan` says.

    Every worker calls it with the same plan.

    Args:
        plan: When workers synchronise, how tensors are encoded, what is done with the mean, and with whom.
        model: A DDP model, one sharded by FSDP2, or a bare module, compiled or not.
        optimizer: One optimizer, or all that train the model: a step is over when each has stepped once, in any order.
        group: The workers that synchronise: by default DDP's group or the world; of a sharded model, those that
            hold the same shards. Without torch.distributed it is a world of one, where nothing is sent.
        levels: The groups inside it that the plan may name, from a DeviceMesh (innermost dimension last) or as this
            worker's process groups, innermost first. By default a group of n is n consecutive workers.
        ledger: Where every collective is recorded; by default a new one.
        commit: Whether synchronised weights take effect bucket by bucket ("streaming"), or all at once at the end
            ("atomic": one more copy of the weights, and a synchronisation that fails has changed nothing).
        anchors: Where the weights are kept that deltas start from: on the "device", or on the "cpu".
        timeout_s: How long to wait for the other workers in one collective. By default ten times the longest so far,
            and at least 30 s. Then a `LostWorkerError` names the workers that are missing.
        sync_initial: What happens to weights that differ between workers at the start. True: all take the first
            worker's. False: it is an error. None: it is logged; all take the first worker's on a bare module, and keep
            their own on others.
        nonfinite: What NaN or Inf on one worker leads to: "skip" (no worker steps; when weights are averaged, that
            worker takes the others' mean), "exclude" (average without it), "raise" or "ignore". The default is "skip";
            on a GPU only with fused optimizers, which skip on the device, and the worker is named a step later. With
            other optimizers, and for sharded models, every step would have to wait: "ignore".
        verify_every: After how many synchronisations (a step that averages gradients is one) the workers' weights are
            compared bit for bit. By default after every synchronisation of weights and every 100 steps of gradients;
            0 is never.
        compress_alone: Whether the codec also runs in a world of one, to measure it; nothing is sent there.

    Raises:
        DisagreementError: On all workers, if they differ in model, plan or versions.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    units = find_units(model)
    check_arguments(plan, model, optimizers)
    observers = observers_from_env()
    ledger = Ledger() if ledger is None else ledger
    ddp = find_ddp(model)
    whole = _group_of(ddp, group or replicas_of(units), levels)
    check_sharded(model, units, plan, whole)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    known = Levels(plan.levels, whole, ledger, levels, timeout_s, device)
    late = not units and not _on_cpu(model) and all(map(skips_itself, optimizers))
    policy: NonFinite = nonfinite or ("skip" if late or _on_cpu(model) else "ignore")
    divergence = DivergenceCheck(verify_every)
    model_state = ModelState(ddp.module if ddp else model)
    check = NonFiniteCheck(policy, late=late and policy == "skip")
    averager = GradientAverager(model_state, known, check, compress_alone)
    weights = WeightSync(model_state, known, optimizers, commit, anchors, policy, averager.chosen)
    agree(known.world, "what is attached", handshake_facts(plan, model_state, model, commit))
    plan.check_fragments(len(model_state.originals))
    known.prepare(plan.levels)
    headers = StepHeaders(plan, len(model_state.originals), Stop())
    scaled = [ScaledSteps(each) for each in optimizers]
    path: GradientPath
    if units:
        path = ShardedPath(units, averager, headers)
    elif ddp is not None:
        path = DDPPath(ddp, averager, headers)
    else:
        path = ModulePath(model, averager, headers, scaled)
    sync_initial_weights(model_state, known.world, sync_initial, ddp is None)
    steps = Steps(plan, path, averager, weights, divergence, headers, scaled, ledger)
    session = Session(steps, averager, ledger)
    session.install(scaled)
    for observer in observers:
        session.observe(observer)
    return session


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


def handshake_facts(plan: Plan, model_state: ModelState, model: nn.Module, commit: str) -> dict[str, object]:
    """State what must be the same on all workers."""
    from laconic import __version__

    facts: dict[str, object] = {"laconic": __version__, "torch": torch.__version__}
    facts |= {"plan": repr(plan), "commit": commit}
    facts |= parameter_facts(model.named_parameters())
    return facts | {name: f"{list(b.shape)} {b.dtype}" for name, b in model_state.all_buffers.items()}


def sync_initial_weights(
    model_state: ModelState, queue: CollectiveQueue, sync_initial: bool | None, bare: bool
) -> None:
    """Check whether all workers start from the same weights, and give them the first worker's if asked."""
    found = first_difference(queue, model_state.params)
    if found is not None and sync_initial is not True:
        odd, name = found
        text = f"attach: the first weights of workers {odd} differ from those of the others, first in {name}"
        if sync_initial is False:
            raise DisagreementError(f"{text}. Seed all workers alike, or attach with sync_initial=True.")
        done = "All now have worker 0's." if bare else "They stay different: sync_initial=True would make them equal."
        logger.warning("%s. %s", text, done)
    if sync_initial or (bare and sync_initial is None):
        model_state.broadcast(queue)


def _group_of(
    ddp: DistributedDataParallel | None, group: dist.ProcessGroup | None, levels: Given | None
) -> dist.ProcessGroup | None:
    if group is not None:
        return group
    if ddp is not None:
        found: dist.ProcessGroup = ddp.process_group
        return found
    if levels is not None:
        return whole_of(levels)
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _on_cpu(model: nn.Module) -> bool:
    return all(p.device.type == "cpu" for p in model.parameters())
