"""Stores with their types, and the default process group: made again in one process, with a timeout that changes."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed has them without types

__all__ = ["PrefixStore", "Store", "TCPStore", "all_groups", "reset_group_names", "set_timeout"]


def reset_group_names() -> None:
    """Restart the counter that names new groups.

    All members must use the same names, and a group that failed to form leaves the counters different.
    """
    dist.distributed_c10d._world.group_count = 0


def all_groups() -> list[dist.ProcessGroup]:
    """Return every process group of this process."""
    return list(dist.distributed_c10d._world.pg_map)


def set_timeout(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Change how long torch lets a collective of a group take. Public in torch since 2.14."""
    change = dist.set_timeout if hasattr(dist, "set_timeout") else dist.distributed_c10d._set_pg_timeout
    change(timedelta(seconds=timeout_s), group)
