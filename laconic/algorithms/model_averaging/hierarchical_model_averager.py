"""Hierarchical model averaging: small groups often, large ones seldom. The twin of torch's module.

Different from torch's: a hierarchy that cannot be meant is refused with its numbers; groups are made by their members
alone, so two averagers in one world do not wait for each other.
"""

import logging
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from laconic.algorithms.model_averaging import averagers, utils
from laconic.algorithms.model_averaging.utils import Params
from laconic.comm.groups import subgroup_of

logger = logging.getLogger(__name__)

__all__ = ["HierarchicalModelAverager"]


class HierarchicalModelAverager(averagers.ModelAverager):
    """Averages the weights in groups of growing size with growing periods (hierarchical SGD, arXiv:2010.12998).

    At a step that several periods divide, only the largest group averages. The phase is torch's: a level averages
    when `step % period == 0`, whatever the warm-up, where `PeriodicModelAverager` counts from the end of the warm-up.

    Args:
        period_group_size_dict: Group sizes by period, both growing; each size divides the next, and the last is the
            size of the process group.
        warmup_steps: Steps before the first averaging. With a post-local SGD hook, its `start_localSGD_iter`.
        process_group: The workers; None for all.

    >>> levels = OrderedDict([(4, 8), (16, 16)])
    >>> averager = HierarchicalModelAverager(period_group_size_dict=levels, warmup_steps=100)  # doctest: +SKIP
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        if not period_group_size_dict:
            raise ValueError("Arg ``period_group_size_dict`` must not be empty.")
        if warmup_steps < 0:
            raise ValueError("Arg ``warmup_steps`` must be a non-negative number.")
        _check(period_group_size_dict, self.process_group.size())
        if list(period_group_size_dict)[-1] == 1:
            warnings.warn(
                "When the maximum period in arg ``period_group_size_dict`` is 1, no need to use model averaging: it "
                "sends as much as averaging gradients, which DistributedDataParallel overlaps with the backward pass.",
                stacklevel=2,
            )
        self.warmup_steps = warmup_steps
        self._sizes = OrderedDict(period_group_size_dict)
        self._periods = list(self._sizes)
        self._make_groups()

    def average_parameters(self, params: Params) -> None:
        """Average `params`, of a model or an optimizer's groups, at the level of this step, and count the step."""
        if self.step >= self.warmup_steps:
            group = self._find_process_group()
            if group is not None:
                self._check_warmup(self.warmup_steps)
                utils.average_parameters_or_parameter_groups(params, group)
        self.step += 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what was saved, in the default process group; the levels' groups are made anew."""
        super().__setstate__(state)
        _check(self._sizes, self.process_group.size())
        self._make_groups()

    def _make_groups(self) -> None:
        self.period_process_group_dict: OrderedDict[int, dist.ProcessGroup] = OrderedDict()
        for period, size in self._sizes.items():
            logger.info("Groups of %s workers average their weights every %s steps.", size, period)
            whole = size == self.process_group.size()
            self.period_process_group_dict[period] = (
                self.process_group if whole else subgroup_of(self.process_group, size)
            )

    def _find_process_group(self) -> dist.ProcessGroup | None:
        for period in reversed(self._periods):
            if self.step % period == 0:
                return self.period_process_group_dict[period]
        return None


def _check(levels: Mapping[int, int], workers: int) -> None:
    periods, sizes = list(levels), list(levels.values())
    if periods[0] <= 0:
        raise ValueError("The minimum period in arg ``period_group_size_dict`` must be a positive value.")
    if sizes[-1] != workers:
        raise ValueError(
            f"The last value in arg ``period_group_size_dict`` {sizes[-1]} "
            f"must be equal to the size of arg ``process_group`` {workers}."
        )
    for (period, size), (next_period, next_size) in zip(levels.items(), list(levels.items())[1:], strict=False):
        if next_period <= period:
            raise ValueError(
                f"period_group_size_dict has period {next_period} after {period}: periods must grow from level to "
                "level, and be positive. Sort them: OrderedDict(sorted(...))."
            )
        if next_size < size or next_size % size:
            raise ValueError(
                f"period_group_size_dict has groups of {next_size} after groups of {size}: each size must be "
                f"a multiple of the one before, so that groups nest. Use a multiple of {size}."
            )
    if min(sizes) < 1:
        raise ValueError(f"period_group_size_dict has groups of {min(sizes)} workers: a group has at least 1.")
