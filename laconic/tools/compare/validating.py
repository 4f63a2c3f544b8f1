"""Validation while a run goes on: the loss of the mean of all workers' weights.

Workers average over a process group of their own, which is neither in the ledger nor on the link under study, and take
their own weights back afterwards, bit for bit. The time of it does not count. So training does not notice. Under
`alone()` there are no averaged weights: each worker validates its own, and the mean of their losses is reported.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from laconic.plans.schedules import Never
from laconic.session.observers import Validation
from laconic.session.session import Session


class Validator:
    """Validates every `every` steps and at the end. All workers call it after the same steps.

    `control` is the group that workers agree over, `replicas` the one of workers that hold the same part of the model.
    """

    def __init__(self, every: int, control: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None) -> None:
        self._every = every
        self._control = control
        self._replicas = replicas
        self._since = 0
        self.paused_s = 0.0
        """The seconds of all validations."""

    def __call__(self, session: Session, validation: Validation | None, last: bool) -> float | None:
        """The mean validation loss of all workers, if the script has one for this step; else None."""
        if validation is None:
            return None
        if not callable(validation):
            return mean_over(self._control, number(validation))[0]
        self._since += 1
        # A fragment that is in flight would travel while the clock stands still.
        late = session.in_flight and self._since < 2 * self._every
        if not last and (self._since < self._every or late):
            return None
        self._since = 0
        if self._control is not None:
            dist.barrier(self._control)  # to wait for the slowest worker is part of the training
        began = time.perf_counter()
        with mean_weights(session, self._replicas):
            value = number(validation())
        mean = mean_over(self._control, value)[0]
        self.paused_s += time.perf_counter() - began
        return mean


@contextmanager
def mean_weights(session: Session, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Let the model hold the mean of all workers' weights and buffers while the block runs, then this worker's own."""
    plan = session.plan
    if group is None or not plan.local or isinstance(plan.schedule, Never) or session.step < plan.schedule.start:
        yield  # all workers have the same weights, or each has its own for good
        return
    with mean_of([local(t) for t in (*session.parameters.values(), *session.buffers.values())], group):
        yield


@contextmanager
def mean_of(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Iterator[None]:
    """Let tensors hold their mean over all workers while the block runs, then this worker's own values, bit for bit."""
    before = [t.clone() for t in tensors]
    with torch.no_grad():
        for t in tensors:
            total = t.to("cpu", torch.promote_types(t.dtype, torch.float32), copy=True)
            dist.all_reduce(total, group=group)
            t.copy_(total / group.size())
    try:
        yield
    finally:
        with torch.no_grad():
            for t, own in zip(tensors, before, strict=True):
                t.copy_(own)


def mean_over(group: dist.ProcessGroup | None, *values: float) -> tuple[float, ...]:
    """The mean of each value over the workers, bit-identical on all of them."""
    if group is None:
        return values
    means = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(means, group=group)
    return tuple((means / group.size()).tolist())


def local(t: Tensor) -> Tensor:
    """The part of a tensor that this worker holds, contiguous or not."""
    return (t.to_local() if isinstance(t, DTensor) else t).detach()


def number(value: float | Tensor) -> float:
    """A loss as a number."""
    return float(value.detach() if isinstance(value, Tensor) else value)
