"""`optimizer.step(closure)`: gradients are computed inside the step, and averaged and checked there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import WorkerError, run_workers

PLANS = ["ddp()", "power_sgd(rank=2, bits=None)", "diloco(period=2)", "post_local_sgd(start=3, period=2)"]


def _train(worker: int, text: str, ddp: bool, closures: bool) -> tuple[Tensor, int, list[float]]:
    model: nn.Module = DistributedDataParallel(mlp()) if ddp else mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = laconic.attach(laconic.plan(text), model, optimizer, clip_norm=0.5)
    losses = []
    for step in range(6):

        def evaluate(step: int = step) -> Tensor:
            optimizer.zero_grad()
            x, y = batch(worker, step)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        if not closures:
            loss = evaluate()
            optimizer.step()
        elif step % 2:
            loss = optimizer.step(evaluate)
        else:
            loss = optimizer.step(closure=evaluate)
        losses.append(loss.item())
    return weights(model), session.ledger.wire_bytes, losses


@pytest.mark.parametrize("ddp", [False, True], ids=["bare", "ddp"])
@pytest.mark.parametrize("text", [*PLANS[:2], *(pytest.param(text, marks=pytest.mark.slow) for text in PLANS[2:])])
def test_a_closure_trains_as_the_loop_without_one(text: str, ddp: bool):
    with_closures, without = (run_workers(_train, 2, (text, ddp, closures)) for closures in (True, False))
    assert_equal_bits([result[0] for result in (*with_closures, *without)])
    assert [result[1:] for result in with_closures] == [result[1:] for result in without]


def _nan_inside(worker: int, ddp: bool) -> tuple[Tensor, Tensor]:
    model: nn.Module = DistributedDataParallel(mlp()) if ddp else mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    laconic.attach(laconic.power_sgd(rank=1), model, optimizer)
    found = []
    for step in range(4):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            x, y = batch(worker, step)
            loss = F.cross_entropy(model(x), y) * (float("nan") if worker == 1 and step == 2 else 1.0)
            loss.backward()
            return loss.item()

        optimizer.step(closure)
        found.append(weights(model))
    assert torch.equal(found[1], found[2])  # nobody took the step of the NaN, and none takes it later
    assert not torch.equal(found[2], found[3])
    return found[1], found[3]


@pytest.mark.parametrize("ddp", [False, True], ids=["bare", "ddp"])
def test_nan_in_a_closure_is_found_in_the_same_step(ddp: bool):
    results = run_workers(_nan_inside, 2, (ddp,))
    for which in (0, 1):
        assert_equal_bits([result[which] for result in results])
        assert bool(results[0][which].isfinite().all())


def _lbfgs(worker: int, text: str) -> float:
    model = mlp(width=8, depth=1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    laconic.attach(laconic.plan(text), model, optimizer)
    x, y = batch(worker, 0, width=8)

    def closure() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    first = closure()
    for _ in range(3):
        last: Any = optimizer.step(closure)
    assert last < first
    return float(last)


def test_an_optimizer_that_evaluates_again():
    with pytest.raises(WorkerError, match=r"LBFGS calls its closure more than once in a step, and ddp\(\) averages"):
        run_workers(_lbfgs, 2, ("ddp()",))
    run_workers(_lbfgs, 1, ("ddp()",), group=False)
    run_workers(_lbfgs, 2, ("diloco(period=2)",))


class _Deaf(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


def test_a_closure_that_is_not_called():
    model = nn.Linear(2, 1)
    optimizer = _Deaf(model.parameters(), lr=0.1)
    with laconic.attach(laconic.ddp(), model, optimizer), pytest.raises(RuntimeError, match="has not called its clos"):
        optimizer.step(lambda: 0.0)
