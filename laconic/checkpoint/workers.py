"""Which worker this is, of how many, and how the workers wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch.distributed as dist

Barrier: TypeAlias = Callable[[], object] | dist.ProcessGroup | None


def is_whole(value: object, least: int) -> bool:
    """Whether a value is an int from `least` to 2**63 - 1, and no bool."""
    return type(value) is int and least <= value < 2**63


def resolve_worker(worker: int | None, workers: int | None) -> tuple[int, int | None]:
    """Check the index of a worker; by default it is the rank in torch.distributed, or 0 of 1.

    >>> resolve_worker(None, None), resolve_worker(2, 4), resolve_worker(2, None)
    ((0, 1), (2, 4), (2, None))
    """
    if worker is None and workers is None:
        running = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
    if worker is None or not is_whole(worker, 0) or not (workers is None or is_whole(workers, 1)):
        raise ValueError(f"worker={worker!r}, workers={workers!r}: give whole numbers, such as worker=0, workers=4.")
    if workers is not None and worker >= workers:
        raise ValueError(f"worker={worker}, workers={workers}: workers count from 0, so the last is {workers - 1}.")
    return worker, workers


def resolve_barrier(barrier: Barrier, workers: int) -> Callable[[], object]:
    """Return the callable that waits for all workers."""
    if workers == 1:
        return lambda: None
    if callable(barrier):
        return barrier
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"save(workers={workers}, barrier={barrier!r}): the workers must wait for each other. Give a barrier, "
            "a callable that returns when all have called it, or initialise torch.distributed."
        )
    size = dist.get_world_size(barrier)
    if size != workers:
        raise ValueError(f"save(workers={workers}): the group has {size} workers. Give the group of those that save.")
    return lambda: dist.barrier(barrier)
