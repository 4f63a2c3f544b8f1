"""`attach(clip_norm=...)` clips the gradient that the optimizer steps with, on every kind of model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.session.sharding import attached, sharded, shards, steps, two_by_two
from tests.session.sharding import batch as small_batch
from tests.workers import run_workers

CLIP = 0.05


def _train(worker: int, kind: str, text: str, by_user: bool, scaled: bool) -> Tensor:
    module = mlp()
    model: nn.Module = DistributedDataParallel(module) if kind == "ddp" else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
    clip_norm = None if by_user else CLIP
    with laconic.attach(laconic.plan(text), model, optimizer, scaler=scaler, clip_norm=clip_norm) as session:
        for step in range(4):
            x, y = batch(worker, step)
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            if by_user:
                scaler.unscale_(optimizer)
                session.average_gradients()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        session.average_weights()
    return weights(module)


QUICK = [("ddp", "power_sgd(rank=1, min_compression=0)", True), ("bare", "ddp()", False)]
ALL = [
    (kind, text, scaled)
    for kind in ("ddp", "bare")
    for text in ("ddp()", "power_sgd(rank=1, min_compression=0)", "post_local_sgd(period=2)")
    for scaled in (False, True)
]


def _both(worker: int, cases: list[tuple[str, str, bool]]) -> list[tuple[Tensor, Tensor]]:
    return [
        (_train(worker, kind, text, False, scaled), _train(worker, kind, text, True, scaled))
        for kind, text, scaled in cases
    ]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_it_is_the_clip_of_a_user_who_clips_averaged_and_unscaled_gradients(cases):
    here, there = run_workers(_both, 2, (cases,))
    for case, (ours, users), (others, _) in zip(cases, here, there, strict=True):
        torch.testing.assert_close(ours, users, rtol=1e-5, atol=1e-7, msg=str(case))
        assert_equal_bits([ours, others])
        assert (ours - weights(mlp())).norm() < 4 * 0.5 * 4 * CLIP  # lr, and at most 1 + 0.9 + ... of momentum


def _sharded(worker: int) -> tuple[Tensor, Tensor]:
    mesh = two_by_two()
    model, optimizer, _ = attached("power_sgd(rank=1)", "2-D", mesh)
    steps(model, optimizer, worker, 3)  # clips at 0.5
    ours = sharded(mesh)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    with laconic.attach(laconic.power_sgd(rank=1), ours, optimizer, clip_norm=0.5):
        for step in range(3):
            x, y = small_batch(worker, step)
            F.mse_loss(ours(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return shards(ours), shards(model)


@pytest.mark.slow
def test_the_norm_of_a_sharded_model_is_over_all_shards():
    for ours, users in run_workers(_sharded, 4):
        torch.testing.assert_close(ours, users, rtol=1e-5, atol=1e-7)


def test_each_optimizer_is_clipped_by_its_own_norm():
    one, two = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
    model = nn.ModuleList([one, two])
    first, second = torch.optim.SGD(one.parameters(), lr=1.0), torch.optim.SGD(two.parameters(), lr=1.0)
    with laconic.attach(laconic.ddp(), model, [first, second], clip_norm=0.5):
        one.weight.grad, two.weight.grad = torch.ones(1, 4), torch.full((1, 4), 0.1)
        first.step()
        second.step()
    assert one.weight.grad.norm().item() == pytest.approx(0.5, rel=1e-4)
    assert two.weight.grad.norm().item() == pytest.approx(0.2, rel=1e-6)  # short enough: not scaled up


def test_sparse_gradients_are_clipped():
    table = nn.Embedding(8, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    with laconic.attach(laconic.post_local_sgd(period=4), table, optimizer, clip_norm=0.5):
        table(torch.tensor([1, 1, 3])).sum().backward()
        optimizer.step()
    assert table.weight.grad is not None and table.weight.grad.is_sparse
    assert table.weight.grad.to_dense().norm().item() == pytest.approx(0.5, rel=1e-4)


def _differ(worker: int) -> str:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(laconic.DisagreementError) as caught:
        laconic.attach(laconic.ddp(), model, optimizer, clip_norm=1.0 + worker)
    return str(caught.value)


def test_workers_must_have_the_same_norm():
    assert "clip_norm" in run_workers(_differ, 2)[0]


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), True, "1.0"])
def test_a_wrong_norm_is_refused(wrong):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"attach\(clip_norm=.*a number above 0, such as 1.0"):
        laconic.attach(laconic.ddp(), model, optimizer, clip_norm=wrong)
