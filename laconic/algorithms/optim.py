"""An optimizer that averages the weights after its steps. The twin of `torch.distributed.optim.PostLocalSGDOptimizer`.

Differences from torch: it supports all of `torch.optim.Optimizer`, with step hooks, closures, schedulers, copies and
distributed checkpoints. A worker whose step a GradScaler skips still takes part in the averaging.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from laconic.algorithms.model_averaging.averagers import ModelAverager
from laconic.session.scaling import ScaledSteps
from laconic.torch_private.steps import forget_scaling, is_nested_step

__all__ = ["PostLocalSGDOptimizer"]


class PostLocalSGDOptimizer(Optimizer):
    """Wraps an optimizer. After each of its steps, a model averager averages the weights if its schedule says so.

    Args:
        optim: The local optimizer.
        averager: The model averager of its parameters.

    >>> averager = PeriodicModelAverager(period=4, warmup_steps=100)  # doctest: +SKIP
    >>> optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), averager)  # doctest: +SKIP
    """

    def __init__(self, optim: Optimizer, averager: ModelAverager) -> None:
        self.optim = optim
        self.averager = averager
        self._initialized = False  # the constructor of the base class must not change the wrapped optimizer
        super().__init__(optim.param_groups, optim.defaults)
        self._initialized = True

    # With this flag a GradScaler always calls `step`. After an overflow `LossScaling` skips the local update only.
    _step_supports_amp_scaling = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizer."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._initialized:
            self.optim.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._initialized:
            self.optim.state = state

    def __repr__(self) -> str:
        return repr(self.optim)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state and the averager's `"step"`, which DCP does not keep."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict`. That of the wrapped optimizer alone is accepted with a warning."""
        self.optim.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        if "step" not in state_dict:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0.",
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run the wrapped optimizer's step, then the averager, and return the closure's loss."""
        arguments = () if closure is None else (closure,)
        if getattr(self, "found_inf", None) is None:
            loss: float | None = self.optim.step(*arguments)
        else:
            with _scaled_steps(self.optim):
                self.optim.found_inf, self.optim.grad_scale = self.found_inf, self.grad_scale  # type: ignore[attr-defined]
                loss = self.optim.step(*arguments)
        self.averager.average_parameters(params=self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        if self._initialized:
            self.optim.add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {"optim": self.optim, "averager": self.averager}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["optim"], state["averager"])  # type: ignore[misc]


@contextmanager
def _scaled_steps(optimizer: Optimizer) -> Iterator[None]:
    """Let steps of an optimizer change nothing where a GradScaler has found an overflow."""
    scaled = ScaledSteps(optimizer)

    def before(*_: object) -> None:
        if not is_nested_step(optimizer):
            scaled.begin_step()

    def after(*_: object) -> None:
        if not is_nested_step(optimizer):
            scaled.end_step()

    hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        forget_scaling(optimizer)
