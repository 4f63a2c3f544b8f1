"""What other code does to a model and its optimizers: wrappers of frameworks, DDP, optimizers not given to attach.

A wrapper of a model is known by its class: torch.compile's and Fabric's. One that is not known, and that hides a
DistributedDataParallel, is refused. A wrapper of an optimizer is known by what it lacks: torch calls the hooks of a
step only for optimizers that have run `Optimizer.__init__`, and those of accelerate, Lightning and Fabric have not.
They pass each step on to the one optimizer that they hold.
"""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from laconic.codecs.feedback import has_feedback
from laconic.comm.groups import Levels
from laconic.comm.queue import CollectiveQueue
from laconic.plans.plan import Plan
from laconic.session.live_model import LiveModel
from laconic.torch_private.modules import ddp_models_of, inside_compiled
from laconic.torch_private.steps import running_steps, runs_hooks

if TYPE_CHECKING:
    from laconic.session.session import Session

logger = logging.getLogger(__name__)

_MOVES_WEIGHTS = ("ScheduleFreeWrapper", "ScheduleFreeWrapperReference")
"""Wrappers that change weights after the step of the optimizer inside."""


def model_inside(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of torch.compile and Fabric."""
    while True:
        fabric = type(model).__name__ == "_FabricModule"
        inside = model._forward_module if fabric else inside_compiled(model)
        if not isinstance(inside, nn.Module):
            return model
        model = inside


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP model, also inside a wrapper of torch.compile or Fabric; None for another model."""
    inside = model_inside(model)
    return inside if isinstance(inside, DistributedDataParallel) else None


def optimizer_inside(optimizer: object) -> object:
    """Return the torch optimizer that a wrapper passes its steps on to; another object as it is."""
    while hasattr(optimizer, "param_groups") and not runs_hooks(optimizer):
        held = [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]
        if len(held) != 1:
            break
        optimizer = held[0]
    return optimizer


def scaler_of(wrapper: object) -> GradScaler | None:
    """Return the GradScaler with which accelerate's wrapper steps; None for another object."""
    found = None if runs_hooks(wrapper) else getattr(wrapper, "scaler", None)
    return found if isinstance(found, GradScaler) else None


def report_step(wrapper: object, skipped: bool) -> None:
    """Note on accelerate's wrapper whether the step was skipped; its schedulers do not step then.

    It takes a step for skipped that its GradScaler does not call, and under laconic the GradScaler calls each step.
    """
    if hasattr(wrapper, "_is_overflow"):
        wrapper._is_overflow = skipped
        if skipped:
            wrapper._accelerate_step_called = False  # type: ignore[attr-defined]


def check_wrapper(optimizer: object, plan: Plan) -> None:
    """Refuse plans that average weights under a wrapper that changes them after the step of the optimizer inside."""
    name = type(optimizer).__name__
    if plan.local and name in _MOVES_WEIGHTS:
        raise ValueError(
            f"attach({plan!r}, model, {name}): this wrapper changes the weights after the step of the optimizer "
            "inside, so weights that are averaged then do not stay equal. Use a plan that averages gradients, such as "
            "power_sgd(), or an optimizer that needs no wrapper, such as schedulefree.AdamWScheduleFree."
        )


sessions: weakref.WeakSet[Session] = weakref.WeakSet()
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


def warn_of_lost_state(plan: Plan, optimizers: Sequence[Optimizer], world: CollectiveQueue) -> None:
    """Log a warning if a session is at its first step and an optimizer is not: a resume that forgot the workers' state.

    A plan that keeps nothing between steps loses nothing.
    """
    keeps = plan.local or has_feedback(plan.codec) or plan.schedule.start > 1
    taken = max(map(steps_taken, optimizers), default=0)
    if not keeps or not taken or world.workers == 1 or world.peers.rank > 0:
        return
    logger.warning(
        "the optimizer has taken %d steps or more, and the session none: no session.load_state_dict() came after "
        "attach. Residuals start at zero, %r counts its steps from 1, and what workers held by themselves is lost. If "
        "this run resumes, let every worker save its own session.state_dict() and load it (laconic.checkpoint does "
        "both): a file that worker 0 alone has saved has only its own.",
        taken,
        plan,
    )


def steps_taken(optimizer: Optimizer) -> int:
    """Return how many steps an optimizer has taken, as far as its state tells: at least 1 where it has momentum."""
    taken = 0
    for state in optimizer.state.values():
        if isinstance(state, dict) and "step" in state:
            return int(state["step"])  # the first tells: on a GPU it may have to wait
        if isinstance(state, dict) and any(isinstance(each, Tensor) for each in state.values()):
            taken = 1
    return taken


def _is_attached(parameters: set[int]) -> bool:
    attached = [session for session in sessions if session.attached]
    return any(id(p) in parameters for session in attached for p in session.parameters.values())


# One pair of global hooks for all sessions: torch iterates over them, so garbage collection must not remove any.
_hooks: list[RemovableHandle] = []


class OtherOptimizers:
    """Raises after the step of an optimizer that holds trained parameters of the model and was not given.

    It holds nothing alive: a model that is dropped without `detach` is freed. The session that owns it holds the
    optimizers, so their ids are theirs as long as it lives.
    """

    def __init__(self, live: LiveModel) -> None:
        self._live = weakref.ref(live)
        self._given = {id(each) for each in live.optimizers}
        self._given_steps = 0
        self._begun: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """How many steps of given optimizers there were when another's step began."""
        self._unrelated: weakref.WeakKeyDictionary[Optimizer, tuple[int, object]] = weakref.WeakKeyDictionary()
        """Optimizers that hold none of the model's parameters: how many they hold, and the names that were known."""

    def install(self) -> OtherOptimizers:
        """Watch the steps of all optimizers."""
        _watching.add(self)
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_any_step))
            _hooks.append(register_optimizer_step_post_hook(_after_any_step))
        return self

    def remove(self) -> None:
        """Stop watching."""
        _watching.discard(self)
        if not _watching:
            for hook in _hooks:
                hook.remove()
            _hooks.clear()

    def before(self, optimizer: Optimizer) -> None:
        """Note that a step begins."""
        if id(optimizer) in self._given:
            self._given_steps += 1
        elif self._held_by(optimizer):
            self._begun[optimizer] = self._given_steps

    def after(self, optimizer: Optimizer) -> None:
        """Raise if the step was not one of ours."""
        if id(optimizer) in self._given:
            return
        names = [name for name, p in self._held_by(optimizer).items() if p.grad is not None]
        if not names or self._is_wrapper(optimizer) or any(id(each) in self._given for each in running_steps()):
            return
        kind = type(optimizer).__name__
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise RuntimeError(
            f"attach was not given {kind}, which has changed {names[0]}{others}: no session synchronises its steps, "
            "so the workers then have different weights. Give attach all optimizers of the model in a list: "
            "attach(plan, model, [optimizer, another])."
        )

    def _is_wrapper(self, optimizer: Optimizer) -> bool:
        """Return whether a given optimizer has stepped inside this step, or shares its parameter groups."""
        stepped, live = self._begun.pop(optimizer, self._given_steps) != self._given_steps, self._live()
        groups = {id(group) for each in (live.optimizers if live else ()) for group in each.param_groups}
        return stepped or any(id(group) in groups for group in optimizer.param_groups)

    def _held_by(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the trained parameters of the model that an optimizer holds, by name."""
        live = self._live()
        if live is None:
            return {}
        names, params = live.name_of, [p for group in optimizer.param_groups for p in group["params"]]
        known = self._unrelated.get(optimizer)
        if known is not None and known[0] == len(params) and known[1] is names:
            return {}
        held = {names[id(p)]: p for p in params if id(p) in names}
        if not held:
            self._unrelated[optimizer] = (len(params), names)
        return held


_watching: weakref.WeakSet[OtherOptimizers] = weakref.WeakSet()


def _before_any_step(optimizer: Optimizer, *_: object) -> None:
    for each in list(_watching):
        each.before(optimizer)


def _after_any_step(optimizer: Optimizer, *_: object) -> None:
    for each in list(_watching):
        each.after(optimizer)
