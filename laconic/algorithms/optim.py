"""The optimizer that averages after its steps. The twin of `torch.distributed.optim.PostLocalSGDOptimizer`.

Different from torch's, it is a whole `torch.optim.Optimizer`: step hooks, closures, schedulers, copies and
distributed checkpoints work; `param_groups` are always those of the optimizer inside; and a step that a GradScaler
skips on this worker alone still takes part in the averaging, where torch's workers would wait for each other for ever.
"""

import warnings
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from laconic.algorithms.model_averaging.averagers import ModelAverager
from laconic.session.grad_scaler import ScaledSteps

__all__ = ["PostLocalSGDOptimizer"]


class PostLocalSGDOptimizer(Optimizer):
    """Wraps an optimizer; after each of its steps, a model averager does what is due.

    Args:
        optim: The local optimizer.
        averager: What averages its parameters, by its own schedule.

    >>> optimizer = PostLocalSGDOptimizer(
    ...     optim=torch.optim.SGD(model.parameters(), lr=0.01),
    ...     averager=PeriodicModelAverager(period=4, warmup_steps=100),
    ... )  # doctest: +SKIP
    """

    def __init__(self, optim: Optimizer, averager: ModelAverager) -> None:
        self.optim = optim
        self.averager = averager
        self._made = False  # while the base class sets itself up, it must not touch what is inside
        super().__init__(optim.param_groups, optim.defaults)
        self._made = True

    # A GradScaler calls `step` whatever it finds, and `step` leaves the local update out: see `laconic.session.grad_scaler`.
    _step_supports_amp_scaling = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer inside."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._made:
            self.optim.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the optimizer inside."""
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._made:
            self.optim.state = state

    def __repr__(self) -> str:
        return repr(self.optim)

    def state_dict(self) -> dict[str, Any]:
        """The local optimizer's state and, as `"step"`, the averager's step.

        A bare optimizer loads it as well. Tools that keep only `state` and `param_groups`, as
        `torch.distributed.checkpoint` does, lose the step: save `averager.state_dict()` beside it there.
        """
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; a bare optimizer's state dict serves too, with a warning."""
        self.optim.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        if "step" not in state_dict:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0.",
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do the local optimizer's step, then what the averager has due, and return the closure's loss."""
        if getattr(self, "found_inf", None) is None:
            loss = self._local_step(closure)
        else:
            with ScaledSteps(self.optim):
                self.optim.found_inf, self.optim.grad_scale = self.found_inf, self.grad_scale  # type: ignore[attr-defined]
                loss = self._local_step(closure)
        self.averager.average_parameters(params=self.param_groups)
        return loss

    def _local_step(self, closure: Callable[[], float] | None) -> float | None:
        loss: float | None = self.optim.step() if closure is None else self.optim.step(closure)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer inside."""
        if self._made:
            self.optim.add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {"optim": self.optim, "averager": self.averager}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["optim"], state["averager"])  # type: ignore[misc]
