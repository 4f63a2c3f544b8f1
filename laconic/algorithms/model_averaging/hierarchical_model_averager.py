"""Hierarchical model averaging: small groups average often, large groups rarely. The twin of torch's module.

Differences from torch: an invalid hierarchy raises an error that names the numbers. Only its members create a group.
"""

import logging
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch.distributed as dist

from laconic.algorithms.model_averaging.averagers import ModelAverager
from laconic.algorithms.model_averaging.utils import Params
from laconic.comm.groups import subgroup_of

logger = logging.getLogger(__name__)

__all__ = ["HierarchicalModelAverager"]


class HierarchicalModelAverager(ModelAverager):
    """Averages the weights in groups of increasing size with increasing periods (hierarchical SGD, arXiv:2010.12998).

    At a step that several periods divide, only the largest group averages. As in torch, a level averages when
    `step % period == 0`, whatever the warm-up, while `PeriodicModelAverager` counts from the end of the warm-up.

    Args:
        period_group_size_dict: Group sizes by period, both increasing. The last is the size of the process group.
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
        self._create_groups()

    def average_parameters(self, params: Params) -> None:
        """Average `params`, of a model or an optimizer's groups, at the level of this step, and count the step."""
        group = self._find_process_group()
        if group is not None and self.step >= self.warmup_steps:
            self._average(params, group, self.warmup_steps)
        self.step += 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled averager, with the default process group and new groups for the levels."""
        super().__setstate__(state)
        _check(self._sizes, self.process_group.size())
        self._create_groups()

    def _create_groups(self) -> None:
        self.period_process_group_dict: OrderedDict[int, dist.ProcessGroup] = OrderedDict()
        for period, size in self._sizes.items():
            logger.info("Groups of %s workers average their weights every %s steps.", size, period)
            is_whole = size == self.process_group.size()
            group = self.process_group if is_whole else subgroup_of(self.process_group, size)
            self.period_process_group_dict[period] = group

    def _find_process_group(self) -> dist.ProcessGroup | None:
        periods = [period for period in self._periods if self.step % period == 0]
        return self.period_process_group_dict[periods[-1]] if periods else None


def _check(levels: Mapping[int, int], workers: int) -> None:
    periods, sizes = list(levels), list(levels.values())
    if periods[0] <= 0:
        raise ValueError("The minimum period in arg ``period_group_size_dict`` must be a positive value.")
    if sizes[-1] != workers:
        raise ValueError(
            f"The last value in arg ``period_group_size_dict`` {sizes[-1]} "
            f"must be equal to the size of arg ``process_group`` {workers}."
        )
    if min(sizes) < 1:
        raise ValueError(f"period_group_size_dict has groups of {min(sizes)} workers. Use sizes of at least 1.")
    for (period, size), (next_period, next_size) in pairwise(levels.items()):
        if next_period <= period:
            raise ValueError(
                f"period_group_size_dict has period {next_period} after {period}: periods must be positive and "
                "increase from level to level. Sort them: OrderedDict(sorted(...))."
            )
        if next_size < size or next_size % size:
            raise ValueError(
                f"period_group_size_dict has groups of {next_size} after groups of {size}: each size must be "
                f"a multiple of the previous one. Use a multiple of {size}."
            )
