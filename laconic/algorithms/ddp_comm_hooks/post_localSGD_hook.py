"""Post-local SGD's gradient hook. The twin of torch's module of this name.

Differences from torch: the constructor of the state creates the subgroup, also without a GPU. A model averager with
another warm-up raises an error. The state can be saved, pickled and copied, and resuming is bit-exact.
"""

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from laconic.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from laconic.algorithms.ddp_comm_hooks.engine import HookState, group_or_world
from laconic.codecs import Exact
from laconic.comm.groups import subgroup_of, workers_on_this_machine
from laconic.torch_private.distributed import GradBucket

logger = logging.getLogger(__name__)

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]


class PostLocalSGDState(HookState):
    """The iteration after which gradients are averaged within a subgroup, and the groups before and after it.

    Args:
        process_group: The workers that average until `start_localSGD_iter`; None for all.
        subgroup: The workers that average gradients afterwards; None for those on this machine.
        start_localSGD_iter: The first iteration that averages within the subgroup: `warmup_steps` of the averager.
        post_local_gradient_allreduce: Whether gradients are averaged within the subgroup.

    >>> state = PostLocalSGDState(None, None, start_localSGD_iter=100, post_local_gradient_allreduce=False)
    >>> ddp_model.register_comm_hook(state, post_localSGD_hook)  # doctest: +SKIP
    """

    __slots__ = [*("process_group", "subgroup", "start_localSGD_iter", "post_local_gradient_allreduce", "iter")]

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        if start_localSGD_iter < 0:
            raise ValueError(
                f"PostLocalSGDState(start_localSGD_iter={start_localSGD_iter}): iterations count from 0. "
                "Use 0 to average within the subgroup from the start."
            )
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0
        self._reset({})
        logger.info("Gradients are averaged within subgroups after %s iterations.", start_localSGD_iter)
        if dist.is_initialized():
            self._create_subgroup()
            self._get_engine(self.process_group)
            if self.subgroup is not None and post_local_gradient_allreduce:
                self._get_engine(self.subgroup, local=True)

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count an iteration at its last bucket."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_localSGD_iter:
                logger.info("Gradients are averaged within subgroups from now on, after %s iterations.", self.iter)

    def state_dict(self) -> dict[str, Any]:
        """Return settings, iteration and the bucket layout, which decides the order of the sums."""
        return {**{name: getattr(self, name) for name in _SAVED}, "layout": self._layout()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        for name in _SAVED:
            setattr(self, name, state_dict[name])
        self._reset(self._engines, state_dict["layout"])

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the process groups, which cannot be pickled."""
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled state, with the default group. The first bucket creates the subgroup of this machine."""
        self.process_group = self.subgroup = None
        self._engines = {}
        self.load_state_dict(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PostLocalSGDState":
        """Copy settings and iteration; groups are shared."""
        copy = PostLocalSGDState.__new__(PostLocalSGDState)
        copy.__setstate__(self.state_dict())
        copy.process_group, copy.subgroup = self.process_group, self.subgroup
        return copy

    def _create_subgroup(self) -> None:
        if self.subgroup is None and self.post_local_gradient_allreduce:
            group = group_or_world(self.process_group)
            self.subgroup = subgroup_of(group, workers_on_this_machine(group.size()))


_SAVED = ("start_localSGD_iter", "post_local_gradient_allreduce", "iter")

active_states: "weakref.WeakSet[PostLocalSGDState]" = weakref.WeakSet()
"""States whose hook has run. Model averagers compare their warm-up with them."""


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Average gradients over all workers, and from `start_localSGD_iter` on within the subgroup, or not at all."""
    active_states.add(state)
    local = state.iter >= state.start_localSGD_iter
    if local and not state.post_local_gradient_allreduce:
        return noop_hook(None, bucket)
    state._create_subgroup()
    tensors = state._names.gradients(bucket)
    engine = state._get_engine(state.subgroup if local else state.process_group, local)
    if not local:
        state.maybe_increase_iter(bucket)
    return engine.average(tensors, bucket, lambda some: Exact().average(some, {}, engine.queue.peers, reuse=True))
