"""`session.change(plan)` carries residuals over: what the old codec has not delivered, the new one does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.codecs.feedback import residuals_by_name
from tests.workers import run_workers

FEW = "ErrorFeedback(codec=Quantized(bits=1))"


def _gradients(worker: int, kind: str, new: str, void: bool, steps: int) -> tuple[Tensor, Tensor]:
    """SGD at lr 1 with constant gradients: how far the weights are, and what all gradients together amount to."""
    torch.manual_seed(0)
    module = nn.Linear(16, 8, bias=False)
    start = module.weight.detach().clone()
    model: nn.Module = DistributedDataParallel(module) if kind == "ddp" else module
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(worker))
    with laconic.attach(laconic.plan(f"Plan(codec={FEW})"), model, optimizer) as session:
        for step in range(steps):
            if step == 3:
                session.change(laconic.plan(new))
            nan = torch.nan if void and step == 3 and worker == 1 else 1.0
            (model(x) * nan).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        left = residuals_by_name(session.state_dict()["state"]["gradient"]).get("weight", torch.zeros(8, 16))
    own = x.sum(0).expand(8, 16) * (steps - void)
    if new == "ddp()" and steps > 36:
        assert not left.any()
    return start - module.weight.detach(), own - left


@pytest.mark.parametrize("kind", ["ddp", pytest.param("bare", marks=pytest.mark.slow)])
@pytest.mark.parametrize("void", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("new", ["ddp()", "power_sgd(rank=1, bits=None)", f"Plan(codec={FEW.replace('1', '4')})"])
def test_residuals_of_gradients_are_delivered_by_any_codec(kind, new, void):
    for steps in (5, 38):  # while they are delivered, and after it
        _check(run_workers(_gradients, 2, (kind, new, void, steps)))


def _check(results: list[tuple[Tensor, Tensor]]) -> None:
    truth = torch.stack([sent for _, sent in results]).mean(0)
    for moved, _ in results:
        torch.testing.assert_close(moved, truth, rtol=1e-4, atol=1e-4)


def _deltas(worker: int, new: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    module = nn.Linear(16, 8, bias=False)
    start = module.weight.detach().clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(worker))
    with laconic.attach(laconic.plan(f"Plan(schedule=Every(2), codec={FEW})"), module, optimizer) as session:
        for _ in range(4):
            module(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.change(laconic.plan(new))
    return start - module.weight.detach(), x.sum(0).expand(8, 16) * 4


@pytest.mark.parametrize("new", ["ddp()", "post_local_sgd(period=2)"])
def test_residuals_of_deltas_are_averaged_where_the_plan_changes(new):
    results = run_workers(_deltas, 2, (new,))
    truth = torch.stack([own for _, own in results]).mean(0)
    for moved, _ in results:
        torch.testing.assert_close(moved, truth, rtol=1e-5, atol=1e-5)
