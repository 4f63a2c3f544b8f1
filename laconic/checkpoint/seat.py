"""Which worker this is, of how many, and how it meets the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch.distributed as dist

Barrier: TypeAlias = Callable[[], object] | dist.ProcessGroup | None


def seat_of(worker: int | None, workers: int | None) -> tuple[int, int | None]:
    """Check a worker's index, and fill in what was left out: torch.distributed's, or 0 of 1.

    >>> seat_of(None, None), seat_of(2, 4), seat_of(2, None)
    ((0, 1), (2, 4), (2, None))
    """
    if worker is None and workers is None:
        running = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
    if worker is None or not _whole(worker, 0) or not (workers is None or _whole(workers, 1)):
        raise ValueError(f"worker={worker!r}, workers={workers!r}: give whole numbers, such as worker=0, workers=4.")
    if workers is not None and worker >= workers:
        raise ValueError(f"worker={worker}, workers={workers}: workers count from 0, so the last is {workers - 1}.")
    return worker, workers


def _whole(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def meeting(barrier: Barrier, workers: int) -> Callable[[], object]:
    """Choose how the workers wait for each other."""
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
