"""Process groups: backends by device, names and timeouts; stores with their types; the default group, made again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._C._distributed_c10d import PrefixStore as PrefixStore  # torch.distributed has the stores without types
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


def ordered_by_stream(group: ProcessGroup, device: torch.device | None = None) -> bool:
    """Return whether the backend that serves tensors on `device` orders collectives by CUDA stream, as NCCL does.

    The name of a group's backend does not tell: a group may have one backend for the CPU and another for CUDA. Without
    a device, it is CUDA if this process uses it, and the group has a backend for it.
    """
    return backend_name(group, device or _default_device(group)) == "nccl"


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that serves tensors on `device`, such as "gloo" or "nccl"."""
    return str(group._get_backend(torch.device(device.type)).name()).lower()


def second_group(group: ProcessGroup) -> ProcessGroup:
    """Make a second group of the same workers and backends; only they need to take part."""
    return new_group(dist.get_process_group_ranks(group), dist.get_backend(group), _timeout_of(group))


def new_group(ranks: Sequence[int], backend: str, timeout: timedelta | None = None) -> ProcessGroup:
    """Make a group of these workers, of which only they need to take part, under a name that none has had before.

    `dist.new_group(ranks, use_local_synchronization=True)` names a group by its ranks and by how many groups this
    process has. The name comes back when a group was destroyed, while the store still has the addresses of the old one,
    and differs between workers that are in different numbers of groups: both hang (docs/log.md, 2026-11-18).
    """
    c10d, store, rank = dist.distributed_c10d, default_store(), dist.get_rank()
    members = hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
    count = store.add(f"laconic/groups/{members}/{rank}", 1)  # the same on all members: they make the same groups
    kind = dist.Backend(backend)
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(rank),
        list(ranks),
        kind,
        store,
        f"laconic-{members}-{count}",  # type: ignore[arg-type]  # a NewType of torch, which older versions lack
        timeout=timeout or c10d._get_default_timeout(kind),
    )
    assert isinstance(group, ProcessGroup)
    c10d._world.pg_group_ranks[group] = {each: index for index, each in enumerate(ranks)}
    return group


def destroy_group(group: ProcessGroup) -> None:
    """Destroy a group that no collective runs in, unless it is gone already."""
    if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


is_joining: Callable[[DistributedDataParallel], bool] = attrgetter("_join_config.enable")
"""Return whether training is inside the model's `join()`, where workers may run out of data before the others."""


def default_store() -> Store:
    """Return the store through which the workers of the default group found each other."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def group_store(group: ProcessGroup) -> Store:
    """Return the part of the default store that belongs to one group."""
    return PrefixStore(f"laconic/{group.group_name}", default_store())


def flat_group(mesh: DeviceMesh) -> ProcessGroup:
    """Return the group of all workers of a mesh of several dimensions."""
    return mesh._flatten().get_group()


def reset_group_names() -> None:
    """Restart the counter that names new groups.

    All members must use the same names, and a group that failed to form leaves the counters different.
    """
    dist.distributed_c10d._world.group_count = 0


def all_groups() -> list[ProcessGroup]:
    """Return every process group of this process."""
    return list(dist.distributed_c10d._world.pg_map)


def set_timeout(group: ProcessGroup, timeout_s: float) -> None:
    """Change how long torch lets a collective of a group take. Public in torch since 2.14."""
    change = dist.set_timeout if hasattr(dist, "set_timeout") else dist.distributed_c10d._set_pg_timeout
    change(timedelta(seconds=timeout_s), group)


def _default_device(group: ProcessGroup) -> torch.device:
    types = {device.type for device in group._device_types}
    if "cuda" in types and torch.cuda.is_initialized():
        return torch.device("cuda")
    return torch.device("cpu" if "cpu" in types or not types else sorted(types)[0])


def _timeout_of(group: ProcessGroup) -> timedelta | None:
    """Return the timeout that the user chose for a gloo group; None, torch's default, for other backends."""
    if "cpu" not in {device.type for device in group._device_types}:
        return None
    backend = group._get_backend(torch.device("cpu"))
    return backend.options._timeout if str(backend.name()).lower() == "gloo" else None


class LocalGroup(ProcessGroup):
    """A process group without a backend: every worker gets its own tensors back.

    For models in one process that are equal from the start. DDP calls it when it is made, and when it rebuilds its
    buckets; gradients go through the hook of a session.
    """

    def __init__(self, rank: int, workers: int) -> None:
        super().__init__(rank, workers)  # type: ignore[call-arg]  # also without a store, whatever the stub says
        self._rank, self._workers = rank, workers

    def rank(self) -> int:
        """Return the rank of this worker."""
        return self._rank

    def size(self) -> int:
        """Return the number of workers."""
        return self._workers

    def getBackendName(self) -> str:
        """Return the name that DDP logs."""
        return "local"

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *_: object) -> dist.Work:  # type: ignore[override]
        """Give this worker its own tensor for all others."""
        for rows, x in zip(outputs, inputs, strict=True):
            for row in rows:
                row.copy_(x)
        return _Done(outputs)

    def allreduce(self, tensors: list[Tensor], *_: object) -> dist.Work:  # type: ignore[override]
        """Change nothing."""
        return _Done(tensors)

    def broadcast(self, tensors: list[Tensor], *_: object) -> dist.Work:  # type: ignore[override]
        """Change nothing."""
        return _Done(tensors)


class _Done(dist.Work):
    """A collective that has ended."""

    def __init__(self, result: object) -> None:
        super().__init__()
        self._future: Future[object] = Future()
        self._future.set_result(result)

    def wait(self, timeout: object = None) -> bool:
        """Return at once."""
        return True

    def get_future(self) -> Future[object]:
        """Return a future that has its result."""
        return self._future
