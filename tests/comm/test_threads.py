"""The thread of a queue computes with as many threads as the user has set."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm.queue import CollectiveQueue
from laconic.exchange import Exchange, Gather
from laconic.ledger import Ledger
from tests.workers import run_workers


def _threads_of_a_product(worker: int) -> int:
    """Return how many threads a product of matrices starts in the queue's thread, after `torch.set_num_threads(1)`."""
    queue = CollectiveQueue(dist.group.WORLD, Ledger())

    def product() -> Exchange[int]:
        yield Gather(torch.zeros(1))
        before = len(os.listdir("/proc/self/task"))
        _: Tensor = torch.ones(128, 128) @ torch.ones(128, 128)  # smaller than what torch itself divides
        return len(os.listdir("/proc/self/task")) - before

    started = queue.run(product(), "test")
    queue.close()
    return started


def test_products_keep_to_the_number_of_threads():
    assert run_workers(_threads_of_a_product, 2) == [0, 0]
