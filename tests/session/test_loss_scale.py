"""Error feedback under a GradScaler: residuals follow the loss scale."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.session.sharding import batch as sharded_batch
from tests.session.sharding import sharded, shards, two_by_two
from tests.workers import run_workers

CAST = "Plan(codec=ErrorFeedback(Cast('bf16')))"


class _Run:
    """A training whose loss is scaled or not; worker 1 overflows at step 5."""

    def __init__(self, worker: int, text: str, kind: str, scaled: bool) -> None:
        self.worker = worker
        module = mlp(width=16, depth=1)
        self.module = module
        self.model: nn.Module = DDP(module) if kind == "ddp" else module
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=scaled)
        self.unscale = kind == "unscale_"
        self.session = laconic.attach(laconic.plan(text), self.model, self.optimizer, scaler=self.scaler)

    def steps(self, first: int, last: int) -> Tensor:
        for step in range(first, last):
            x, y = batch(self.worker, step, width=16)
            loss = F.cross_entropy(self.model(x), y) * (torch.inf if self.worker == 1 and step == 5 else 1.0)
            self.scaler.scale(loss).backward()
            if self.unscale:
                self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        return weights(self.module)

    def take_over(self, other: _Run) -> None:
        self.module.load_state_dict(copy.deepcopy(other.module.state_dict()))
        for part in ("optimizer", "scaler", "session"):
            getattr(self, part).load_state_dict(copy.deepcopy(getattr(other, part).state_dict()))


def _both(worker: int, text: str, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    plain = _Run(worker, text, kind, scaled=False).steps(0, 12)
    first, second = (_Run(worker, text, kind, scaled=True) for _ in range(2))
    first.steps(0, 9)
    second.take_over(first)
    whole = first.steps(9, 12)
    assert first.scaler.get_scale() >= 64
    return plain, whole, second.steps(9, 12)


@pytest.mark.parametrize(
    "kind", ["ddp", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bare", "unscale_"))]
)
def test_a_loss_scale_that_grows_changes_nothing(kind):
    # Scales are powers of two: where the codec rounds relative to each number, the bits are those without a scaler.
    for text, tolerance in ((CAST, 0.0), ("power_sgd(rank=1)", 1e-4)):
        results = run_workers(_both, 2, (text, kind))
        for plain, whole, resumed in results:
            torch.testing.assert_close(whole, plain, rtol=tolerance, atol=tolerance)
            assert torch.equal(whole, resumed)
        assert_equal_bits([whole for _, whole, _ in results])


def _unknown_scale(worker: int) -> str:
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    session = laconic.attach(laconic.power_sgd(rank=2), model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    x, y = batch(worker, 0)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    with pytest.raises(RuntimeError) as error:
        scaler.step(optimizer)
    session.detach()
    return str(error.value)


def test_a_scale_that_the_session_cannot_read_is_refused():
    for text in run_workers(_unknown_scale, 2):
        assert text.startswith("power_sgd(rank=2, bits=4) under a GradScaler: gradients are averaged in backward")
        assert "attach(..., scaler=scaler)" in text


def test_gradients_averaged_before_they_are_unscaled_are_refused():
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    plan = laconic.power_sgd(rank=2)
    session = laconic.attach(plan, module, optimizer)
    session.wrap_codec(lambda _: plan.codec)
    scaler = torch.amp.GradScaler("cpu")
    x, y = batch(0, 0)
    scaler.scale(F.cross_entropy(module(x), y)).backward()
    session.average_gradients()
    with pytest.raises(RuntimeError, match=r"Call scaler.unscale_\(optimizer\) before it"):
        scaler.step(optimizer)


def _sharded(worker: int, scaled: bool) -> Tensor:
    model = sharded(two_by_two())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=scaled)
    laconic.attach(laconic.plan(CAST), model, optimizer, scaler=scaler)
    for step in range(7):
        x, y = sharded_batch(worker, step)
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return shards(model)


def test_a_sharded_model_follows_the_scale_too():
    for scaled, plain in zip(run_workers(_sharded, 4, (True,)), run_workers(_sharded, 4, (False,)), strict=True):
        assert torch.equal(scaled, plain)
