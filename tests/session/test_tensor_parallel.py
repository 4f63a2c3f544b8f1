"""Models that `parallelize_module` has sharded inside a machine train as one process does (docs/training.md)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import laconic
from tests.workers import run_workers


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))


def _train(model: nn.Module, batches: list[Tensor], plan: str = "", **options: object) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if plan:
        laconic.attach(laconic.plan(plan), model, optimizer, **options)  # type: ignore[arg-type]
    for batch in batches:
        model(batch).square().mean().backward()
        if not plan:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    weights = (p.detach() for p in model.parameters())
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in weights]


def _batches(replica: int) -> list[Tensor]:
    torch.manual_seed(replica)
    return [torch.randn(4, 16) for _ in range(5)]


def _work(worker: int, plan: str) -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor"))
    model = _net()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    replicas = mesh["replicate"]
    return _train(model, _batches(replicas.get_local_rank()), plan, group=replicas.get_group(), clip_norm=0.1)


@pytest.mark.parametrize("plan", ["ddp()", "post_local_sgd(period=1)", "power_sgd(rank=1)"])
def test_replicas_of_a_tensor_parallel_model(plan):
    found = run_workers(_work, 4, (plan,))
    for weights in found[1:]:
        for own, first in zip(weights, found[0], strict=True):
            assert torch.equal(own, first), "all workers have the same whole weights"
    if plan == "ddp()":
        whole = _train(_net(), [torch.cat(both) for both in zip(_batches(0), _batches(1), strict=True)])
        for own, one in zip(found[0], whole, strict=True):
            torch.testing.assert_close(own, one, rtol=1e-5, atol=1e-6)
