"""What a session asks of each worker does not grow with the number of workers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import laconic
from tests.counting import CountedCollectives, CountingStore
from tests.session.models import batch, mlp
from tests.workers import run_workers

SIZES = (2, 4, 8)
Counts = tuple[Counter[str], Counter[str], Counter[str]]
"""Calls of the store, collectives, and bytes given to collectives."""


def _train(worker: int, workers: int, folder: str, plans: list[str]) -> dict[str, Counts]:
    """Attach, train two steps, detach, under each plan."""
    store = CountingStore(dist.FileStore(f"{folder}/{workers}", workers))
    dist.init_process_group("gloo", store=store, rank=worker, world_size=workers)
    collectives, found = CountedCollectives(), {}
    for plan in plans:
        model = mlp(width=8, depth=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        store.calls.clear()
        collectives.take()
        with laconic.attach(laconic.plan(plan), model, optimizer):
            for step in range(2):
                x, y = batch(worker, step, width=8)
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        del store.calls["check"]  # of the alarm, once for each 0.25 s that a collective takes
        found[plan] = store.calls.copy(), *collectives.take()
    dist.barrier()
    return found


@pytest.mark.parametrize("plan", ["ddp()", "power_sgd(rank=1, bits=None)", "post_local_sgd(period=1)"])
def test_calls_and_bytes_of_a_worker_do_not_grow_with_the_workers(counts, plan):
    of_two, *larger = (counts[size][plan] for size in SIZES)
    for store, calls, sent in [of_two, *larger]:
        assert store == {"add": 1}, "all workers together: a store that grows with workers, and not with workers²"
        # From 8 workers on, a mean of weights is an all_to_all and an all_gather, with the bytes of an all_reduce.
        assert calls.total() <= of_two[1].total() + sent["all_to_all_single"].bit_length()
        assert sent.total() < 1.5 * of_two[2].total()


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("stores"))
    plans = ["ddp()", "power_sgd(rank=1, bits=None)", "post_local_sgd(period=1)"]
    return {size: run_workers(_train, size, (size, folder, plans), group=False)[-1] for size in SIZES}
