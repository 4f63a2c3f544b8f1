"""Process groups: backends by device, their timeouts, the default store."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup


def ordered_by_stream(group: ProcessGroup, device: torch.device | None = None) -> bool:
    """Return whether the backend that serves tensors on `device` orders collectives by CUDA stream, as NCCL does.

    The name of a group's backend does not tell: a group may have one backend for the CPU and another for CUDA. Without
    a device, it is the CPU if the group has a backend for it.
    """
    return backend_name(group, device or _default_device(group)) == "nccl"


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that serves tensors on `device`, such as "gloo" or "nccl"."""
    return str(group._get_backend(torch.device(device.type)).name()).lower()


def second_group(group: ProcessGroup) -> ProcessGroup:
    """Make a second group of the same workers and backends; only they need to take part."""
    ranks = dist.get_process_group_ranks(group)
    backend = dist.get_backend(group)
    ours = dist.new_group(
        ranks,
        timeout=_timeout_of(group),
        backend=None if backend == "undefined" else backend,
        use_local_synchronization=True,
    )
    if not isinstance(ours, ProcessGroup):
        raise RuntimeError("torch.distributed.new_group() did not make this worker a member of its own group.")
    return ours


def default_store() -> Store:
    """Return the store through which the workers of the default group found each other."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def _default_device(group: ProcessGroup) -> torch.device:
    types = {device.type for device in group._device_types}
    return torch.device("cpu" if "cpu" in types or not types else sorted(types)[0])


def _timeout_of(group: ProcessGroup) -> timedelta | None:
    """Return the timeout that the user chose for a gloo group; None, torch's default, for other backends."""
    if "cpu" not in {device.type for device in group._device_types}:
        return None
    backend = group._get_backend(torch.device("cpu"))
    return backend.options._timeout if str(backend.name()).lower() == "gloo" else None
