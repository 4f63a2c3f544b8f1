"""What a session asks of each worker does not grow with the workers, but for the address of each in the store."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.nn.functional import cross_entropy

import laconic
from tests.counting import CountedCollectives, CountingStore
from tests.session.models import batch, mlp
from tests.workers import run_workers

SIZES = (2, 4, 8)
PLANS = ("ddp()", "power_sgd(rank=1, bits=None)", "post_local_sgd(period=1)")
Counts = tuple[Counter[str], Counter[str], Counter[str]]
"""Calls of the store, collectives, and bytes given to collectives."""


def _train(worker: int, workers: int, folder: str) -> dict[str, Counts]:
    """Attach, train two steps, detach, under each plan."""
    store = CountingStore(FileStore(f"{folder}/{workers}", workers))
    dist.init_process_group("gloo", store=store, rank=worker, world_size=workers)
    collectives, found = CountedCollectives(), {}
    for plan in PLANS:
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


@pytest.mark.slow
def test_calls_and_bytes_of_a_worker_do_not_grow_with_the_workers(tmp_path):
    found = {size: run_workers(_train, size, (size, str(tmp_path)), group=False)[-1] for size in SIZES}
    for plan in PLANS:
        _, calls_of_two, sent_of_two = found[2][plan]
        for size in SIZES:
            store, calls, sent = found[size][plan]
            # A process group of our own: its name, this worker's address, and that of every worker, as torch does it.
            assert store == {"add": 1, "set": 1, "wait": size, "get": size}, (plan, size, store)
            # From 8 workers on, a mean of weights is an all_to_all and an all_gather, with the bytes of an all_reduce.
            assert calls.total() <= calls_of_two.total() + calls["all_to_all_single"], (plan, size, calls)
            # In an all_gather every row passes every worker: checks do not use it where all workers agree.
            assert calls["all_gather"] == calls["all_to_all_single"], (plan, size, calls)
            assert sent.total() < 1.5 * sent_of_two.total(), (plan, size, sent)
