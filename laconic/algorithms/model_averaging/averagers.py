"""Model averagers. The twin of torch's module.

Differences from torch: averagers can be saved, copied and pickled. A warm-up other than the hook's raises an error.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from laconic.algorithms.ddp_comm_hooks.engine import group_or_world
from laconic.algorithms.ddp_comm_hooks.post_localSGD_hook import active_states
from laconic.algorithms.model_averaging import utils
from laconic.algorithms.model_averaging.utils import Params

__all__ = ["ModelAverager", "PeriodicModelAverager"]

_GROUPS = ("process_group", "period_process_group_dict", "_other_states")


class ModelAverager(ABC):
    """Base class: averages the weights of the workers of `process_group`, None for all, at some of the steps."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = group_or_world(process_group)
        self.step = 0
        self._other_states = WeakSet(active_states)  # hooks that ran before belong to another training

    @abstractmethod
    def average_parameters(self, params: Params) -> None:
        """Average `params` if this step averages, and count the step."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a worker must save."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.step = state_dict["step"]

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the process groups, which cannot be pickled."""
        return {name: value for name, value in vars(self).items() if name not in _GROUPS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled averager, with the default process group."""
        vars(self).update(state)
        self.process_group = group_or_world(None)
        self._other_states = WeakSet(active_states)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelAverager":
        """Copy settings and counters. The copy shares the process groups."""
        copy = type(self).__new__(type(self))
        vars(copy).update({k: v.copy() if isinstance(v, dict) else v for k, v in vars(self).items()})
        return copy

    def _average(self, params: Params, group: dist.ProcessGroup, warmup_steps: int) -> None:
        """Average `params` within `group`, after a check that the post-local SGD hook has the same warm-up."""
        for state in active_states:
            if state not in self._other_states and state.start_localSGD_iter != warmup_steps:
                raise ValueError(
                    f"the averager has warmup_steps={warmup_steps} and the post-local SGD hook has start_localSGD_iter="
                    f"{state.start_localSGD_iter}: in between, the replicas diverge. Pass the same number to both."
                )
        utils.average_parameters_or_parameter_groups(params, group)


class PeriodicModelAverager(ModelAverager):
    """Averages the weights at step `warmup_steps`, counted from 0, and every `period` steps from then on.

    Args:
        period: Steps between two averagings.
        warmup_steps: Steps before the first averaging. With a post-local SGD hook, its `start_localSGD_iter`.
        process_group: The workers; None for all.

    >>> averager = PeriodicModelAverager(period=4, warmup_steps=100)  # doctest: +SKIP
    >>> averager.average_parameters(model.parameters())  # after each optimizer.step()  # doctest: +SKIP
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        if warmup_steps < 0:
            raise ValueError("Arg ``warmup_steps`` must be a non-negative number.")
        if period < 1:
            raise ValueError("Arg ``period`` must be a positive value.")
        if period == 1:
            warnings.warn(
                "When period is 1, no need to use model averaging: averaging weights at every step sends as much as "
                "averaging gradients, and DistributedDataParallel overlaps that with the backward pass.",
                stacklevel=2,
            )
        self.warmup_steps = warmup_steps
        self.period = period

    def average_parameters(self, params: Params) -> None:
        """Average `params`, of a model or an optimizer's groups, if this step averages, and count the step."""
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            self._average(params, self.process_group, self.warmup_steps)
        self.step += 1
