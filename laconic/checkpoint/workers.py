"""Which worker this is, of how many, and how the workers wait for each other and agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed as dist

from laconic.values import is_whole

Barrier: TypeAlias = Callable[[], object] | dist.ProcessGroup | None


def resolve_worker(worker: int | None, workers: int | None) -> tuple[int, int | None]:
    """Check the index of a worker; by default it is the rank in torch.distributed, or 0 of 1."""
    if worker is None and workers is None:
        return (dist.get_rank(), dist.get_world_size()) if _is_distributed() else (0, 1)
    if worker is None or not is_whole(worker, 0) or not (workers is None or is_whole(workers, worker + 1)):
        raise ValueError(f"worker={worker!r}, workers={workers!r}: give whole numbers, such as worker=0, workers=4.")
    return worker, workers


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def resolve_barrier(barrier: Barrier, workers: int) -> Callable[[], object]:
    """Return the callable that waits for all workers."""
    if workers == 1:
        return lambda: None
    if callable(barrier):
        return barrier
    if not _is_distributed() or dist.get_world_size(barrier) != workers:
        raise ValueError(
            f"save(workers={workers}, barrier={barrier!r}): the workers must wait for each other. Give a process group "
            "of those that save, or a callable that returns when all have called it."
        )
    return lambda: dist.barrier(barrier)


def lowest_and_highest(value: int) -> tuple[int, int]:
    """Compare a value with those of the other workers."""
    if not _is_distributed():
        return value, value
    ends = torch.tensor([value, -value], device=device_of(None))
    dist.all_reduce(ends, dist.ReduceOp.MIN)
    return int(ends[0]), -int(ends[1])


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return where tensors must be that travel in a group: on the CPU, if one of its backends serves it."""
    has_cpu = "cpu:" in dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    return torch.device("cpu" if has_cpu else "cuda")
