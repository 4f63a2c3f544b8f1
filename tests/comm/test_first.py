"""One worker's tensor on all, over real groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from laconic.comm import Exchange, First
from laconic.comm.groups import subgroup_of
from laconic.comm.queue import CollectiveQueue
from laconic.ledger import Ledger
from tests.workers import run_workers


def _first(x: torch.Tensor, worker: int) -> Exchange[torch.Tensor]:
    return (yield First(x, worker))


def _receive(worker: int, size: int, source: int) -> tuple[list[int], list[tuple[str, int, int]]]:
    assert dist.group.WORLD is not None
    queue = CollectiveQueue(subgroup_of(dist.group.WORLD, size), Ledger())
    x = torch.arange(3)[:, None].expand(3, 2)[:, 0] + 10 * worker  # not contiguous in memory
    got = queue.run(_first(x, source), "buffers")
    return got.tolist(), [(e.op, e.payload_bytes, e.wire_bytes) for e in queue.ledger.entries]


@pytest.mark.parametrize(("size", "source"), [(3, 0), (3, 2), (1, 0)])
def test_all_workers_receive_one_workers_tensor(size, source):
    results = run_workers(_receive, 3, (size, source))
    for worker, (got, entries) in enumerate(results):
        assert got == [10 * (source if size > 1 else worker) + i for i in range(3)]
        sends = {0: 2, 1: 0, 2: 0}[(worker - source) % 3]  # gloo's tree: the source sends to both
        assert entries == ([("broadcast", 24, 24 * sends)] if size > 1 else [])
