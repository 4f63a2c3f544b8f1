"""The queue's order: collectives start alike on every worker, whatever the clocks do."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import run_workers

ALL_REDUCE = dist.all_reduce


def _delay_collectives(worker: int, run: int) -> None:
    """Launch collectives late, by another random time on each worker."""
    random_of_worker = random.Random(f"{worker}/{run}")

    def late(*args: Any, **kwargs: Any) -> Any:
        if random_of_worker.random() < 0.05:
            time.sleep(random_of_worker.random() * 0.004)
        return ALL_REDUCE(*args, **kwargs)

    dist.all_reduce = late


def _stress(worker: int, runs: int, steps: int) -> list[Tensor]:
    results = []
    for run in range(runs):
        _delay_collectives(worker, run)
        lots = random.Random(f"backward/{worker}/{run}")
        module = mlp(seed=run, width=256, depth=8)  # 2 MB of gradients in 9 matrices
        ddp = DDP(module, bucket_cap_mb=0.25)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        plan = laconic.power_sgd(rank=2, bits=None, rounds="two" if run % 2 == 0 else "alternating")
        session = laconic.attach(plan, ddp, optimizer)
        for p in ddp.parameters():  # backward itself comes late too
            p.register_hook(lambda grad, lots=lots: time.sleep(lots.random() * 0.002) if lots.random() < 0.02 else None)
        buckets = before = 0
        for step in range(steps):
            x, y = batch(worker, step, width=256, size=2)
            F.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:  # after DDP has rebuilt its buckets
                before = session.ledger.collectives
            if step == 3:
                buckets = (session.ledger.collectives - before) // (2 if run % 2 == 0 else 1)
        assert buckets >= 8, f"only {buckets} buckets"
        results.append(weights(module))
        session.detach()
    return results


@pytest.mark.slow
def test_many_buckets_with_random_delays_stay_in_order():
    _check(run_workers(_stress, 4, (2, 60), timeout_s=150))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_twenty_runs_of_two_hundred_steps_with_random_delays():
    _check(run_workers(_stress, 4, (20, 200), timeout_s=850))


def _check(per_worker: list[list[Tensor]]) -> None:
    for index in range(len(per_worker[0])):
        assert_equal_bits([results[index] for results in per_worker])
        assert per_worker[0][index].isfinite().all()
