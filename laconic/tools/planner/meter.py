"""The workers of a probe: how they start together, and how their seconds become one sample."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm.groups import Levels
from laconic.comm.queue import CollectiveQueue
from laconic.ledger import Ledger
from laconic.tools.machine import host_id

TIMEOUT_S = 120.0
TEXT_BYTES = 256


class Meter:
    """Measures on the default process group, whose workers all call the same methods.

    `device` is where the model computes, `wire` where the tensors of collectives are. `sizes` are those of the groups
    that are measured besides all workers.
    """

    def __init__(self, device: torch.device, wire: torch.device, sizes: Sequence[int] = ()) -> None:
        self.device, self.wire = device, wire
        self.worker, self.workers = dist.get_rank(), dist.get_world_size()
        self._levels = Levels([None], dist.group.WORLD, Ledger(keep=0), timeout_s=TIMEOUT_S, device=wire)
        self.world = self._levels.world
        self.hosts = self._hosts()
        self.sizes = self._named(sizes)
        self._levels.prepare([*sorted(self.sizes.values()), None])

    def _hosts(self) -> list[list[int]]:
        """The workers of each host."""
        text = host_id().encode()[-TEXT_BYTES:].ljust(TEXT_BYTES)
        ids = [bytes(row.tolist()) for row in self.world.gather(torch.tensor(list(text), dtype=torch.uint8))]
        return [[worker for worker, each in enumerate(ids) if each == host] for host in dict.fromkeys(ids)]

    def _named(self, sizes: Sequence[int]) -> dict[str, int]:
        """The size of each level below all workers, by name; a machine is one if all have as many workers."""
        each = len(self.hosts[0])
        in_order = [worker for host in self.hosts for worker in host] == list(range(self.workers))
        found = {f"groups of {size}": size for size in sorted(set(sizes)) if 1 < size < self.workers}
        if 1 < each < self.workers and in_order and {len(host) for host in self.hosts} == {each}:
            found = {"machine": each} | {name: size for name, size in found.items() if size != each}
        return found

    def queue_of(self, size: int) -> CollectiveQueue:
        """Return the queue of the collectives in groups of this size."""
        return self._levels[size]

    def now(self) -> float:
        """Return the time, when the device has done what it was asked for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def start_together(self) -> None:
        """Wait for all workers."""
        self.world.gather(torch.zeros(1))

    def slowest(self, seconds: Sequence[float]) -> tuple[float, ...]:
        """Return the largest of all workers' values, one by one."""
        return tuple(self._all(seconds).amax(0).tolist())

    def mean(self, seconds: Sequence[float]) -> tuple[float, ...]:
        """Return the mean of all workers' values, one by one."""
        return tuple(self._all(seconds).mean(0).tolist())

    def medians(self, seconds: Sequence[float]) -> tuple[float, ...]:
        """Return the median of each worker's values."""
        return tuple(self._all(seconds).quantile(0.5, dim=1).tolist())

    def _all(self, values: Sequence[float]) -> Tensor:
        return self.world.gather(torch.tensor(values, dtype=torch.float64))

    def close(self) -> None:
        """End the queues."""
        self._levels.close()


def devices(name: str) -> tuple[torch.device, torch.device]:
    """Choose where this worker computes, and where the tensors of its collectives are.

    Collectives of CUDA tensors need a device for each worker (NCCL).
    """
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu"), torch.device("cpu")
    here, found = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % found)
    return device, device if here <= found and dist.is_nccl_available() else torch.device("cpu")
