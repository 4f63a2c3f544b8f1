"""Post-local SGD's gradient hook. The twin of torch's module of this name.

Different from torch's: the intra-machine subgroup is made when the state is, not inside a backward pass, and also on
machines without a GPU; a warm-up that differs from a model averager's is refused when the averager first runs; the
state can be saved, pickled and copied, and resuming is bit-exact.
"""

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from laconic.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from laconic.algorithms.ddp_comm_hooks.hooking import Engine, Names, group_or_world
from laconic.codecs import Exact
from laconic.comm.groups import subgroup_of, workers_on_this_machine
from laconic.comm.requests import Exchange

logger = logging.getLogger(__name__)

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]


class _Linked:
    """Holds what a state has beyond torch's: links to the engine, for all workers and for the subgroup."""

    __slots__ = ("__weakref__", "_engines", "_names", "_saved_layout")


class PostLocalSGDState(_Linked):
    """When gradients stop being averaged among all workers, and among whom they are from then on.

    Args:
        process_group: The workers that average until `start_localSGD_iter`; None for all.
        subgroup: The workers that go on averaging gradients afterwards; None for those on this machine.
        start_localSGD_iter: The iteration from which averaging is within the subgroup. A model averager beside it
            must have the same `warmup_steps`; this is checked.
        post_local_gradient_allreduce: Whether gradients are averaged within the subgroup at all.

    >>> state = PostLocalSGDState(None, None, start_localSGD_iter=100, post_local_gradient_allreduce=False)
    >>> ddp_model.register_comm_hook(state, post_localSGD_hook)  # doctest: +SKIP
    """

    __slots__ = [  # noqa: RUF023 - torch's order
        "process_group",
        "subgroup",
        "start_localSGD_iter",
        "post_local_gradient_allreduce",
        "iter",
    ]

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
        self._engines: dict[bool, Engine] = {}
        self._repeat([])
        logger.info("Gradients are averaged within subgroups after %s iterations.", start_localSGD_iter)
        if dist.is_initialized():
            self._make_subgroup()
            self._linked(local=False)
            if self.subgroup is not None and post_local_gradient_allreduce:
                self._linked(local=True)

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count an iteration when its last bucket comes."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_localSGD_iter:
                logger.info("Gradients are averaged within subgroups from now on, after %s iterations.", self.iter)

    def state_dict(self) -> dict[str, Any]:
        """What a worker must save: settings, iteration, and the layout of buckets, which decides the order of sums."""
        return {**{name: getattr(self, name) for name in _SAVED}, "layout": self._layout()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        for name in _SAVED:
            setattr(self, name, state_dict[name])
        self._repeat(state_dict["layout"])

    def __getstate__(self) -> dict[str, Any]:
        """Leave the groups out, for they mean nothing elsewhere."""
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a saved state, with the default group and the subgroup of this machine, made when it is needed."""
        self.process_group = self.subgroup = None
        self._engines = {}
        self.load_state_dict(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PostLocalSGDState":
        """Copy settings and iteration; groups are shared."""
        copy = PostLocalSGDState.__new__(PostLocalSGDState)
        copy.process_group, copy.subgroup, copy._engines = self.process_group, self.subgroup, {}
        copy.load_state_dict(self.state_dict())
        return copy

    def _repeat(self, layout: Sequence[Sequence[str]]) -> None:
        """Average the next backward in this layout of buckets, whatever DDP's is; any layout, if it is empty."""
        self._names = Names()
        self._saved_layout = [list(names) for names in layout]
        for engine in self._engines.values():
            engine.stream.layout = []
            engine.stream.repeat(self._saved_layout)

    def _layout(self) -> list[list[str]]:
        used = [engine.stream.layout for _, engine in sorted(self._engines.items()) if engine.stream.layout]
        return used[-1] if used else self._saved_layout

    def _linked(self, local: bool) -> Engine:
        """Return the link to the engine, of the subgroup or of all workers."""
        group = group_or_world(self.subgroup if local else self.process_group)
        engine = self._engines.get(local)
        if engine is None or engine.group is not group:
            engine = self._engines[local] = Engine(group)
            engine.stream.repeat(self._saved_layout)
        return engine

    def _make_subgroup(self) -> None:
        if self.subgroup is None and self.post_local_gradient_allreduce:
            group = group_or_world(self.process_group)
            self.subgroup = subgroup_of(group, workers_on_this_machine(group.size()))


_SAVED = ("start_localSGD_iter", "post_local_gradient_allreduce", "iter")

at_work: "weakref.WeakSet[PostLocalSGDState]" = weakref.WeakSet()
"""States whose hook has run: model averagers compare their warm-up with them."""


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Average gradients among all workers, and from `start_localSGD_iter` on within the subgroup, or not at all.

    To be combined with a model averager, which brings the weights of the subgroups together.

    >>> ddp_model.register_comm_hook(state, post_localSGD_hook)  # doctest: +SKIP
    """
    at_work.add(state)
    local = state.iter >= state.start_localSGD_iter
    if local and not state.post_local_gradient_allreduce:
        return noop_hook(None, bucket)
    state._make_subgroup()
    tensors = state._names.of(bucket)
    stream = state._linked(local).stream
    if not local:
        state.maybe_increase_iter(bucket)
    return stream.take(tensors, bucket.buffer(), bucket.is_last(), _exact)


def _exact(tensors: Mapping[str, Tensor]) -> Exchange:
    return Exact().average(tensors, {}, reuse=True)
