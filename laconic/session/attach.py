"""Attach a plan to a model and its optimizers: check, build, and install the hooks last."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from laconic.checks.agreement import agree, difference, parameter_facts
from laconic.checks.digests import DivergenceCheck, differences
from laconic.checks.finite import NonFinite, NonFiniteCheck, check_policy
from laconic.codecs import LowRank, TopDCT
from laconic.codecs.feedback import codecs_of, contains
from laconic.comm.groups import Given, GroupWithQueue, Levels, whole_of
from laconic.comm.queue import CollectiveQueue
from laconic.comm.timeout import run_in_thread
from laconic.errors import DisagreementError
from laconic.ledger import Ledger
from laconic.optim import DeMo
from laconic.plans.plan import Plan
from laconic.plans.text import plan as parse_plan
from laconic.session.ddp import DDPPath, check_ddp_model
from laconic.session.foreign import (
    check_wrapper,
    check_wrapping,
    find_ddp,
    model_inside,
    optimizer_inside,
    scaler_of,
    sessions,
)
from laconic.session.fsdp import ShardedPath, check_sharded, replicas_of, shards_of
from laconic.session.gradients import GradientAverager, GradientPath
from laconic.session.live_model import Commit, LiveModel, facts_of_model
from laconic.session.module import ModulePath
from laconic.session.observers import StepObserver, check_observers, observers_from_env
from laconic.session.scaling import Clipping, ScaledSteps
from laconic.session.session import Session
from laconic.session.step_headers import Counts, StepHeaders, Stop, check_rounds
from laconic.session.weights import Anchors, WeightSync, check_choices
from laconic.torch_private.fsdp import find_units
from laconic.torch_private.steps import runs_hooks, skips_itself

logger = logging.getLogger(__name__)

REFUSED = "refused"
"""The fact in which a worker whose arguments were refused says so to the others."""
REFUSED_S = 30.0
"""How long it waits for them."""


def attach(
    plan: Plan | str,
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
    scaler: GradScaler | None = None,
    clip_norm: float | None = None,
    weighted: bool = False,
    observers: Sequence[StepObserver] = (),
) -> Session:
    """Synchronise the workers that hold copies of `model` as `plan` says.

    Every worker calls it with the same plan.

    Args:
        plan: When workers synchronise, how tensors are encoded, what is done with the mean, and with whom. Or its text,
            such as "power_sgd(rank=32)". A target of bytes, such as frugal("60x"), becomes the plan that meets it on
            this model: `session.plan`.
        model: A DDP model, one sharded by FSDP2, or a bare module, compiled or not, or what accelerate's `prepare` or
            Fabric's `setup` returned. A bare module averages gradients at the optimizer's step: before clipping them,
            call `session.average_gradients()`.
        optimizer: One optimizer, or all that train the model: a step is over when each has stepped once, in any order.
            It may be a wrapper that passes its steps on, such as accelerate's or Lightning's.
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
            worker takes the others' mean), "exclude" (average without it), "raise" or "ignore". Of a sharded model, a
            replica is left out with all its shards, and all workers skip or raise together. The default is "skip";
            on a GPU only with fused optimizers, which skip on the device, and the worker is named a step later. With
            other optimizers, and for sharded models, every step would have to wait: "ignore".
        verify_every: After how many synchronisations (a step that averages gradients is one, and a fragment that takes
            effect) the workers' weights are compared bit for bit. By default after every synchronisation of weights,
            and every 100 where each step is one; 0 is never.
        scaler: The GradScaler of the training, if there is one. A DDP or sharded model averages scaled gradients, and
            error feedback must know when the loss scale changes. Bare modules do not need it. That of accelerate is
            found in its wrapper of the optimizer.
        clip_norm: Scale the averaged gradients of each optimizer down to this norm before it steps, as torch's
            `clip_grad_norm_` does: over all shards, after unscaling, and also in steps that average nothing.
        weighted: Whether workers weigh by the samples or tokens that they count with `session.weigh(n)`, in every mean:
            for workers whose batches, or whose numbers of steps, differ. See docs/training.md.
        observers: What watches the session from its first step on, such as `laconic.Guard("warn")`, on every worker.

    Raises:
        DisagreementError: On all workers, if they differ in model, plan or versions.
    """
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    try:
        # 1. What was given: anything wrong with it is refused before a collective is started.
        if isinstance(plan, str):
            plan = parse_plan(plan)
        optimizers = check_arguments(plan, model, given)
        scaler = scaler or next(filter(None, map(scaler_of, given)), None)
        model = model_inside(model)
        clipping, divergence = Clipping(clip_norm), DivergenceCheck(verify_every)
        check_choices(commit, anchors)
        check_options(sync_initial, weighted)
        counts = Counts() if weighted else None
        check_wrapping(model)
        watching = [*check_observers(observers), *observers_from_env()]
        units = find_units(model)
        ledger = Ledger() if ledger is None else ledger
        ddp = find_ddp(model)
        if ddp is not None:
            check_ddp_model(ddp)
        whole = _group_of(ddp, group or replicas_of(units), levels)
        check_sharded(model, units, plan, whole)
        on = facts_of_model(ddp.module if ddp else model, optimizers, 1 if whole is None else whole.size())
        asked, plan = plan, plan.resolved(on)
        for each in given:
            check_wrapper(each, plan)
        if isinstance(own := plan.observer(), StepObserver):
            watching.append(own)
        on_cpu = all(p.device.type == "cpu" for p in model.parameters())
        shards = shards_of(model)
        check_rounds(plan, model, shards is not None)
        late = shards is None and not on_cpu and all(map(skips_itself, optimizers))
        policy: NonFinite = nonfinite or ("skip" if late or on_cpu else "ignore")
        check_policy(policy)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        known = Levels(plan.levels, whole, ledger, levels, timeout_s, device, shards)
    except (TypeError, ValueError) as error:
        _refuse_on_all(error, model, group, levels)
        raise
    try:
        # 2. The parts of a session.
        live = LiveModel(ddp.module if ddp else model, optimizers, sharded=bool(units))
        check = NonFiniteCheck(policy, late=late and policy == "skip", shards=known.shards)
        averager = GradientAverager(live, known, check, scaler if units or ddp else None, counts)
        weights = WeightSync(averager, commit, anchors)
        headers = StepHeaders(plan, live, Stop())
        wrappers = [None if each is around else around for each, around in zip(optimizers, given, strict=True)]
        scaled = [ScaledSteps(each, around) for each, around in zip(optimizers, wrappers, strict=True)]
        # 3. All workers compare what they were given and what they train, and start from the same weights.
        settings = {"commit": commit, "nonfinite": policy, "verify_every": verify_every, "sync_initial": sync_initial}
        facts = _facts(asked, live, model, {**settings, "clip_norm": clip_norm, "weighted": weighted})
        for queue in filter(None, (known.world, known.shards)):
            agree(queue, "what is attached", facts | {"what the plan becomes": repr(plan)})
        warn_of_learning_rates(known.world, optimizers)
        warn_of_momentum(plan, optimizers)
        known.prepare(plan.levels)
        if known.world.workers > 1 and known.world.peers.rank == 0:
            warn_of_doing_less(plan, live, known)
        path: GradientPath
        if units:
            path = ShardedPath(units, averager, headers)
        elif ddp is not None:
            path = DDPPath(ddp, averager, headers)
        else:
            path = ModulePath(model, averager, headers, scaled)
        sync_initial_weights(live, known.world, sync_initial, bare=ddp is None)
        # 4. Hooks last.
        session = Session(plan, asked, path, averager, weights, headers, scaled, clipping, divergence, ledger)
        session._install()
        sessions.add(session)
        if plan is not asked and known.world.peers.rank == 0:
            logger.info("attach: %s is %s: %.1f times fewer bytes than ddp()", asked, plan, on.times(plan))
    except BaseException:
        known.close()
        raise
    try:
        for observer in watching:
            session.observe(observer)
    except BaseException:
        session.detach()
        raise
    return session


def check_arguments(plan: object, model: object, given: Sequence[object]) -> list[Optimizer]:
    """Refuse what cannot be attached; return the optimizers inside those that were given."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"attach({_shown(plan)}, ...): the first argument is a Plan or its text, such as "
            'laconic.power_sgd(rank=4) or "power_sgd(rank=4)".'
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach(plan, {_shown(model)}, ...): the second argument is the model, a torch.nn.Module.")
    optimizers = [each for each in map(optimizer_inside, given) if isinstance(each, Optimizer)]
    if not given or len(optimizers) < len(given):
        raise TypeError(
            "attach(plan, model, optimizer): the third argument is a torch.optim.Optimizer, or several in a list, not "
            f"{', '.join(map(_shown, given)) or 'an empty list'}. Schedulers are not attached."
        )
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    lazy = next((name for name, t in named if is_lazy(t)), None)
    if lazy is not None:
        raise ValueError(
            f"attach: {lazy} of {type(model).__name__} is not initialized: a lazy module learns its shape from its "
            "first input, and only then can workers compare and average it. Call model(x) with a batch before attach."
        )
    ours = {id(p) for p in model.parameters()}
    for each in optimizers:
        if not runs_hooks(each):
            raise ValueError(
                f"attach: {type(each).__name__} has not run torch.optim.Optimizer.__init__, so torch calls no hooks at "
                "its steps. Call super().__init__(params, defaults) in it, or give attach the optimizer that it wraps."
            )
        if not any(id(p) in ours for group in each.param_groups for p in group["params"]):
            raise ValueError(
                f"attach: {type(each).__name__} holds none of the model's parameters: its steps are not the model's. "
                "Make the optimizer from model.parameters(), after moving the model to its device."
            )
    return optimizers


def check_options(sync_initial: object, weighted: object) -> None:
    """Refuse what is neither a bool nor, of `sync_initial`, None."""
    if not isinstance(sync_initial, bool | None):
        raise ValueError(
            f"attach(sync_initial={sync_initial!r}): it must be True (all workers take the first worker's weights), "
            "False (weights that differ are an error), or None (they are logged)."
        )
    if not isinstance(weighted, bool):
        raise TypeError(
            f"attach(weighted={weighted!r}): it must be True or False. How much a worker weighs is counted in each "
            "step: session.weigh(n)."
        )


def _refuse_on_all(error: Exception, model: object, group: dist.ProcessGroup | None, levels: Given | None) -> None:
    """Take part in the handshake of the other workers, so that they raise, too, and do not wait for this one.

    Where they do not come to it, this worker raises its own error after `REFUSED_S`; it logs it at once.
    """
    if not isinstance(model, nn.Module) or isinstance(group, GroupWithQueue):
        return
    try:
        whole = _group_of(find_ddp(model), group or replicas_of(find_units(model_inside(model))), levels)
    except (TypeError, ValueError):
        return  # which workers there are is not known
    if whole is None or whole.size() == 1:
        return
    text = f"{type(error).__name__}: {error}"
    logger.error("%s", text)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def take_part() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own
        known = Levels((), whole, Ledger(), timeout_s=REFUSED_S, device=device)
        try:
            agree(known.world, "what is attached", {REFUSED: text})
        finally:
            known.close()

    with contextlib.suppress(RuntimeError, TimeoutError):  # the caller raises the error that the user can mend
        run_in_thread(take_part).result(REFUSED_S)


def _shown(value: object) -> str:
    if isinstance(value, str | int | float | None):
        return repr(value)
    return value.__name__ if isinstance(value, type) else type(value).__name__


def _facts(plan: Plan, live: LiveModel, model: nn.Module, settings: Mapping[str, object]) -> dict[str, object]:
    """State what must be the same on all workers."""
    from laconic import __version__

    facts: dict[str, object] = {
        REFUSED: "nothing",
        "laconic": __version__,
        "torch": torch.__version__,
        "plan": repr(plan),
        **settings,
    }
    facts |= parameter_facts(model.named_parameters())
    facts |= parameter_facts(live.all_buffers.items(), "buffer")
    return facts | live.held


def warn_of_learning_rates(queue: CollectiveQueue, optimizers: Sequence[Optimizer]) -> None:
    """Log a warning on all workers if their learning rates differ: it is rarely meant."""
    rates = {
        f"learning rate of optimizer {index}, group {number}": float(group.get("lr", 0.0))
        for index, each in enumerate(optimizers)
        for number, group in enumerate(each.param_groups)
    }
    found = difference(queue, rates)
    if found is not None:
        logger.warning("attach: %s. Workers go on with different learning rates.", found)


def warn_of_momentum(plan: Plan, optimizers: Sequence[Optimizer]) -> None:
    """Log a warning if gradients get momentum twice, in the codec and in an optimizer, or not at all."""
    in_codec = contains(plan.codec, TopDCT) and not plan.local
    for each in optimizers:
        name, signs = type(each).__name__, isinstance(each, DeMo)
        plain = isinstance(each, torch.optim.SGD) and not any(group["momentum"] for group in each.param_groups)
        if in_codec and not signs and not plain:
            logger.warning(
                "attach: the codec of %r keeps the momentum, and %s keeps moments of its own. Such plans are made for "
                "laconic.optim.DeMo(params, lr=...).",
                plan,
                name,
            )
        if signs and not in_codec:
            logger.warning(
                "attach: DeMo steps by the sign of what %r delivers, without momentum: no codec keeps any. It is made "
                "for laconic.demo().",
                plan,
            )


def warn_of_doing_less(plan: Plan, live: LiveModel, levels: Levels) -> None:
    """Log a warning if a plan does less than its name says: low rank without matrices, groups of one or of all."""
    sizes = [(t.shape[0], t.shape[1:].numel()) for t in live.params.values() if t.dim() >= 2]
    for codec in codecs_of(plan.codec, LowRank):
        if any(codec.accepts(torch.Size(size)) for size in sizes):
            continue
        rows, columns = max(sizes, key=math.prod, default=(0, 0))
        too_small = f"the largest matrix, {rows} x {columns}, would not get {codec.min_compression:g} times smaller"
        logger.warning(
            "attach: %r sends nothing of this model in rank %d: %s. All is sent as vectors and small tensors are. "
            "Take a smaller rank, or quantized_ddp(), which says what is done.",
            plan,
            codec.rank,
            too_small if sizes else "it has no matrix",
        )
    inner = plan.topology.inner
    size, workers = 0 if inner is None else levels[inner].workers, levels.world.workers
    if size in (1, workers):
        reason = (
            "is one worker, so nothing is averaged inside groups"
            if size == 1
            else f"is all {workers} workers, which average exactly at every step: nothing is left to do between groups"
        )
        logger.warning("attach: in %r a group (%r) %s.", plan, inner, reason)


def sync_initial_weights(live: LiveModel, queue: CollectiveQueue, sync_initial: bool | None, bare: bool) -> None:
    """Check whether all workers start from the same model, and give them the first worker's if asked."""
    tensors = live.everything()
    found = differences(queue, tensors)
    if not found:
        return
    if sync_initial is not True:
        first = next(iter(found))
        text = f"attach: the first weights of workers {found[first]} differ from those of the others, first in {first}"
        if sync_initial is False:
            raise DisagreementError(f"{text}. Seed all workers alike, or attach with sync_initial=True.")
        done = "All now have worker 0's." if bare else "They stay different: sync_initial=True would make them equal."
        logger.warning("%s. %s", text, done)
    if sync_initial or bare:
        live.take_from(0, queue, {name: tensors[name] for name in found})


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
