"""Optimizers that `attach` was not given, and that change the model all the same.

Their steps are synchronised by no session, so the weights of the workers would part. torch calls global hooks at the
steps of all optimizers: the first such step raises. A wrapper around an optimizer that `attach` was given may step, and
so may an optimizer inside one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from laconic.session.model_state import ModelState
from laconic.torch_private.optimizers import running_steps

# One pair of global hooks for all sessions: torch iterates over them, so garbage collection must not remove any.
_hooks: list[RemovableHandle] = []


class OtherOptimizers:
    """Raises after the step of an optimizer that holds trained parameters of the model and was not given.

    It holds nothing alive: a model that is dropped without `detach` is freed.
    """

    def __init__(self, model_state: ModelState, given: Iterable[Optimizer]) -> None:
        self._model_state = weakref.ref(model_state)
        self._given = weakref.WeakSet(given)
        self._given_steps = 0
        self._begun: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """How many steps of given optimizers there were when another's step began."""
        self._strangers: weakref.WeakKeyDictionary[Optimizer, tuple[int, object]] = weakref.WeakKeyDictionary()
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
        if optimizer in self._given:
            self._given_steps += 1
        elif self._held_by(optimizer):
            self._begun[optimizer] = self._given_steps

    def after(self, optimizer: Optimizer) -> None:
        """Raise if the step was not one of ours."""
        held = {} if optimizer in self._given else self._held_by(optimizer)
        names = [name for name, p in held.items() if p.grad is not None]
        if not names or self._is_wrapper(optimizer) or any(each in self._given for each in running_steps()):
            return
        kind = type(optimizer).__name__
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise RuntimeError(
            f"attach was not given {kind}, which has changed {names[0]}{others}: its steps are not synchronised, and "
            "the weights of the workers part. Give attach all optimizers of the model in a list: "
            "attach(plan, model, [optimizer, another])."
        )

    def _is_wrapper(self, optimizer: Optimizer) -> bool:
        """Return whether a given optimizer has stepped inside this step, or shares its parameter groups."""
        if self._begun.pop(optimizer, self._given_steps) != self._given_steps:
            return True
        groups = {id(group) for each in self._given for group in each.param_groups}
        return any(id(group) in groups for group in optimizer.param_groups)

    def _held_by(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the trained parameters of the model that an optimizer holds, by name."""
        model_state = self._model_state()
        if model_state is None:
            return {}
        count, names = sum(len(group["params"]) for group in optimizer.param_groups), model_state.name_of
        known = self._strangers.get(optimizer)
        if known is not None and known[0] == count and known[1] is names:
            return {}
        params = [p for group in optimizer.param_groups for p in group["params"]]
        held = {names[id(p)]: p for p in params if id(p) in names}
        if not held:
            self._strangers[optimizer] = (count, names)
        return held


_watching: weakref.WeakSet[OtherOptimizers] = weakref.WeakSet()


def _before_any_step(optimizer: Optimizer, *_: object) -> None:
    for each in list(_watching):
        each.before(optimizer)


def _after_any_step(optimizer: Optimizer, *_: object) -> None:
    for each in list(_watching):
        each.after(optimizer)
