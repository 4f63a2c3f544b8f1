"""Model averagers. The twin of torch's module.

Different from torch's: counters are saved and restored (`state_dict`), averagers can be copied and pickled, and a
warm-up that is not the same as a post-local SGD hook's is refused where torch would let replicas drift.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from laconic.algorithms.ddp_comm_hooks.hooking import group_or_world
from laconic.algorithms.ddp_comm_hooks.post_localSGD_hook import at_work
from laconic.algorithms.model_averaging import utils
from laconic.algorithms.model_averaging.utils import Params

__all__ = ["ModelAverager", "PeriodicModelAverager"]


class ModelAverager(ABC):
    """Brings the weights of a group's workers together now and then.

    Args:
        process_group: The workers; None for all.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = group_or_world(process_group)
        self.step = 0
        self._strangers = WeakSet(at_work)  # hooks that ran before: of another training

    @abstractmethod
    def average_parameters(self, params: Params) -> None:
        """Average `params` if it is time, and count the step."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What a worker must save."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.step = state_dict["step"]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the groups out, for they mean nothing elsewhere."""
        return {name: value for name, value in vars(self).items() if name not in _GROUPS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what was saved, with the default process group."""
        vars(self).update(state)
        self.process_group = group_or_world(None)
        self._strangers = WeakSet(at_work)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelAverager":
        """Copy settings and counters; groups are shared."""
        copy = type(self).__new__(type(self))
        vars(copy).update(
            {name: value.copy() if isinstance(value, dict) else value for name, value in vars(self).items()}
        )
        return copy

    def _check_warmup(self, warmup_steps: int) -> None:
        """Refuse a warm-up that is not the one of the post-local SGD hook at work beside this averager."""
        for state in at_work:
            if state not in self._strangers and state.start_localSGD_iter != warmup_steps:
                raise ValueError(
                    f"the averager has warmup_steps={warmup_steps} and the post-local SGD hook beside it "
                    f"start_localSGD_iter={state.start_localSGD_iter}: between the two, gradients and weights would "
                    "both be averaged, or neither, and replicas drift apart. Give both the same number."
                )


_GROUPS = ("process_group", "period_process_group_dict", "_strangers")


class PeriodicModelAverager(ModelAverager):
    """Averages the weights every `period` steps after a warm-up.

    It averages at step `warmup_steps` (counted from 0) and every `period` steps from there.

    Args:
        period: Steps from one averaging to the next.
        warmup_steps: Steps before the first one. With a post-local SGD hook, the same as its `start_localSGD_iter`.
        process_group: The workers; None for all.

    >>> averager = PeriodicModelAverager(period=4, warmup_steps=100)  # doctest: +SKIP
    >>> for step in range(200):  # doctest: +SKIP
    ...     optimizer.zero_grad()
    ...     loss_fn(model(inputs), labels).backward()
    ...     optimizer.step()
    ...     averager.average_parameters(model.parameters())
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
        """Average `params`, of a model or an optimizer's groups, if it is time, and count the step."""
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            self._check_warmup(self.warmup_steps)
            utils.average_parameters_or_parameter_groups(params, self.process_group)
        self.step += 1
