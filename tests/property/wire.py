"""What a worker really passes to torch.distributed's collectives, counted beside the ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor


class Wire:
    """Counts the bytes that one worker sends, by the formulas of ring collectives and of gloo's broadcast."""

    def __init__(self) -> None:
        self.sent = 0.0
        self.collectives = 0
        counts: dict[str, Callable[..., float]] = {
            "all_reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "broadcast": self._broadcast,
            "all_to_all_single": self._all_to_all_single,
        }
        for name, count in counts.items():
            setattr(dist, name, self._counting(name, getattr(dist, name), count))
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "reduce", "gather", "scatter", "send"):
            setattr(dist, name, _unexpected(name))

    def _counting(self, name: str, call: Callable[..., Any], count: Callable[..., float]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            workers = dist.get_world_size(group)
            if workers > 1:
                self.collectives += 1
                x, *rest = args
                if name == "broadcast":
                    rest[0] = dist.get_process_group_ranks(group).index(rest[0])
                self.sent += count(workers, dist.get_rank(group), x, *rest)
            return call(*args, **kwargs)

        return counted

    def _all_reduce(self, workers: int, me: int, x: Tensor, *_: object) -> float:
        return 2 * (workers - 1) / workers * x.nbytes

    def _all_gather(self, workers: int, me: int, out: list[Tensor], x: Tensor, *_: object) -> float:
        return (workers - 1) * x.nbytes

    def _broadcast(self, workers: int, me: int, x: Tensor, source: int, *_: object) -> float:
        """In gloo's tree, all that have it pass it on: 1, then 2, then 4 workers, to as many others."""
        place, have, sends = (me - source) % workers, 1, 0
        while have < workers:
            sends += place < have and place + have < workers
            have *= 2
        return sends * x.nbytes

    def _all_to_all_single(
        self, workers: int, me: int, out: Tensor, x: Tensor, out_sizes: list[int], sizes: list[int], *_: object
    ) -> float:
        return (sum(sizes) - sizes[me]) * x.nbytes / max(1, sum(sizes))


def _unexpected(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"torch.distributed.{name} is not counted: add it to tests/property/wire.py")

    return refuse
