"""Plans on CUDA: two workers over gloo with their models on one GPU, beside the same on CPUs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.rounds import Anchors
from tests.cluster.models import assert_equal_bits, batch, mlp, weights
from tests.workers import run_workers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

PLANS = [
    "ddp()",
    "power_sgd(rank=2)",
    "power_sgd(rank=2, rounds='two')",
    "post_local_sgd(period=4, start=5)",
    "diloco(period=4)",
    "streaming_diloco(period=4, fragments=2)",
    "Plan(schedule=Every(2), codec=ErrorFeedback(LowRank(2, min_compression=0)), outer=Nesterov())",
]


def _train(worker: int, plan: str, kind: str, device: str, anchors: Anchors) -> Tensor:
    model = mlp().to(device)
    trained = DDP(model, bucket_cap_mb=0.005) if kind == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with laconic.attach(laconic.plan(plan), trained, optimizer, anchors=anchors):
        for step in range(12):
            x, y = batch(worker, step)
            F.cross_entropy(trained(x.to(device)), y.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model).cpu()


@pytest.mark.parametrize("kind", ["bare", "ddp"])
@pytest.mark.parametrize("plan", PLANS)
def test_workers_on_a_gpu_agree_and_do_what_cpus_do(plan, kind):
    on_gpu = run_workers(_train, 2, (plan, kind, "cuda", "device"), timeout_s=120)
    on_cpu = run_workers(_train, 2, (plan, kind, "cpu", "device"))
    if "streaming" not in plan:  # whose workers agree only on the fragment that was last
        assert_equal_bits(on_gpu)
    for there, here in zip(on_gpu, on_cpu, strict=True):
        assert torch.allclose(there, here, rtol=1e-3, atol=1e-4)


def test_anchors_on_the_host_are_the_same_as_on_the_gpu():
    here = run_workers(_train, 2, ("diloco(period=4)", "bare", "cuda", "device"), timeout_s=120)
    there = run_workers(_train, 2, ("diloco(period=4)", "bare", "cuda", "cpu"), timeout_s=120)
    assert_equal_bits([*here, *there])
