"""What torch 2.15 adds to DDP and FSDP2: buckets that are freed after backward, and a backward that the user ends."""

from __future__ import annotations

import gc
from inspect import signature
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.session.sharding import attached, two_by_two
from tests.session.sharding import batch as sharded_batch
from tests.workers import run_workers

LAZY = "lazy_bucket_allocation" in signature(DDP).parameters
MANUAL = hasattr(DDP, "require_manual_backward_finalization")

PLANS = ["ddp()", "power_sgd(rank=2)", "quantized_ddp()", "post_local_sgd(period=2, start=3)"]

LARGEST = 4 * 32 * 32
"""The bytes of the model's largest parameter: a bucket has more."""


def _train(worker: int, text: str, options: dict[str, Any]) -> tuple[torch.Tensor, bool]:
    """Train; return the weights, and whether a bucket is alive between two steps."""
    module = mlp()
    ddp = DDP(module, bucket_cap_mb=0.002, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with laconic.attach(laconic.plan(text), ddp, optimizer):
        for step in range(6):
            x, y = batch(worker, step)
            F.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        alive = {t.untyped_storage() for t in gc.get_objects() if type(t) is torch.Tensor}
        return weights(module), max(storage.nbytes() for storage in alive) > LARGEST


@pytest.mark.skipif(not LAZY, reason="lazy_bucket_allocation is new in torch 2.15")
@pytest.mark.parametrize("find_unused", [False, True], ids=["all used", "find_unused"])
@pytest.mark.parametrize("text", PLANS)
def test_buckets_that_ddp_frees_train_alike_and_are_freed(text, find_unused):
    seen = []
    for lazy in (False, True):
        options = {"lazy_bucket_allocation": lazy, "find_unused_parameters": find_unused}
        results = run_workers(_train, 2, (text, options))
        assert_equal_bits([trained for trained, _ in results])
        seen.append(results[0])
    assert_equal_bits([trained for trained, _ in seen])
    assert [alive for _, alive in seen] == [True, False]
