"""What torch 2.15 adds to DDP and FSDP2: buckets that are freed after backward, and a backward that the user ends."""

from __future__ import annotations

import gc
import time
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
        alive = _is_bucket_alive()
        for _ in range(100 if alive and options["lazy_bucket_allocation"] else 0):
            time.sleep(0.05)  # the queue's thread may still hold the last one
            alive = alive and _is_bucket_alive()
        return weights(module), alive


def _is_bucket_alive() -> bool:
    gc.collect()
    alive = {t.untyped_storage() for t in gc.get_objects() if type(t) is torch.Tensor and not t.is_meta}
    return max(storage.nbytes() for storage in alive) > LARGEST


@pytest.mark.skipif(not LAZY, reason="lazy_bucket_allocation is new in torch 2.15")
@pytest.mark.parametrize(
    ("text", "find_unused"),
    [
        ("ddp()", False),
        ("power_sgd(rank=2)", True),
        ("Plan(codec=Quantized(4))", False),  # with error feedback, residuals are as large as buckets
        ("post_local_sgd(period=2, start=3)", False),
    ],
)
def test_buckets_that_ddp_frees_train_alike_and_are_freed(text, find_unused):
    seen = []
    for lazy in (False, True):
        options = {"lazy_bucket_allocation": lazy, "find_unused_parameters": find_unused}
        results = run_workers(_train, 2, (text, options))
        assert_equal_bits([trained for trained, _ in results])
        seen.append(results[0])
    assert_equal_bits([trained for trained, _ in seen])
    assert [alive for _, alive in seen] == [True, False]


def _refused(worker: int, later: bool) -> str:
    ddp: Any = DDP(mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if later:
        laconic.attach(laconic.ddp(), ddp, optimizer)
    ddp.require_manual_backward_finalization = True
    x, y = batch(worker, 0)
    with pytest.raises(RuntimeError) as caught:  # noqa: PT012
        if not later:
            laconic.attach(laconic.ddp(), ddp, optimizer)
        F.cross_entropy(ddp(x), y).backward()
        ddp.finalize_backward()
        optimizer.step()
    return str(caught.value)


def _refused_sharded(worker: int, later: bool) -> str:
    mesh = two_by_two()
    model, _, _ = attached("ddp()", "1-D" if later else "native", mesh)
    model.set_manual_backward_finalization(True)  # type: ignore[operator]
    x, y = sharded_batch(worker, 0)
    with pytest.raises(RuntimeError) as caught:  # noqa: PT012
        if not later:
            laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters(), lr=0.1))
        F.mse_loss(model(x), y).backward()
    return str(caught.value)


@pytest.mark.skipif(not MANUAL, reason="manual finalization is new in torch 2.15")
@pytest.mark.parametrize("later", [False, True], ids=["before attach", "after attach"])
def test_a_backward_that_the_user_ends_is_refused(later):
    for text in run_workers(_refused, 2, (later,)):
        assert text.startswith("attach: require_manual_backward_finalization is set, so gradients may not be there yet")
        assert text.endswith("Set it to False. Backward then ends as before.")
    for text in run_workers(_refused_sharded, 4, (later,)):
        assert text.startswith("attach: set_manual_backward_finalization(True) is set, so gradients may not be there")
        assert text.endswith("Call it with False. Backward then ends as before.")
