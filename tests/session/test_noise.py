"""The gradient noise that the guard measures, beside its value by definition, under every kind of plan."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.noise import MOST_NOISE, NoiseAverage, worth
from tests.workers import run_workers

IN, OUT, BATCH = 64, 48, 32
"""Of a linear regression, and the batch of a worker."""


class _Regression:
    """Targets are those of other weights, with noise of variance 1. So small a learning rate moves no weight."""

    def __init__(self, worker: int, ddp: bool = False, dtype: torch.dtype = torch.float32, scale: float = 0.0) -> None:
        torch.manual_seed(0)
        self.module = nn.Linear(IN, OUT, bias=False).to(dtype)
        self.model: nn.Module = DistributedDataParallel(self.module) if ddp else self.module
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-12)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale > 0)
        self._dtype = dtype
        self._error = 0.1 * torch.randn(OUT, IN)
        """The weights minus those of the targets: the gradient without noise."""
        self._generator = torch.Generator().manual_seed(worker + 1)

    def steps(self, count: int) -> None:
        for _ in range(count):
            x = torch.randn(BATCH, IN, generator=self._generator).to(self._dtype)
            noise = torch.randn(BATCH, OUT, generator=self._generator)
            targets = self.module.weight.detach().float() @ x.float().T - self._error @ x.float().T + noise.T
            loss = 0.5 * (self.model(x).float() - targets.T).square().sum() / BATCH
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    @property
    def noise(self) -> float:
        """By definition. The gradient of an example is (E x − e) xᵀ, and E |E x|² |x|² = (IN + 2) |E|² of normal x."""
        signal = float(self._error.square().sum())
        return ((IN + 1) * signal + IN * OUT) / BATCH / signal


def _measured(worker: int, plan: str, ddp: bool, dtype: torch.dtype, scale: float) -> tuple[Any, dict[str, float]]:
    own_scale = scale * (worker + 1) if laconic.plan(plan).local else scale  # as after an overflow on some workers
    task = _Regression(worker, ddp, dtype, own_scale)
    attach = {"scaler": task.scaler} if scale else {}
    guard = laconic.Guard("warn", every=1)
    with laconic.attach(laconic.plan(plan), task.model, task.optimizer, observers=[guard], **attach) as session:  # type: ignore[arg-type]
        task.steps(4)
        assert session.health is None or session.health.noise is session.health.worth is None  # too early
        task.steps(100)
        return session.health, session.metrics()


@pytest.mark.parametrize(
    ("plan", "ddp", "dtype", "scale"),
    [
        ("ddp()", False, torch.float32, 0.0),
        ("power_sgd(rank=2)", True, torch.float32, 0.0),
        pytest.param("power_sgd(rank=2)", True, torch.float32, 256.0, marks=pytest.mark.slow),
        pytest.param("quantized_ddp()", True, torch.bfloat16, 0.0, marks=pytest.mark.slow),
        pytest.param('frugal("60x")', False, torch.float32, 0.0, marks=pytest.mark.slow),
        ('frugal("60x")', True, torch.bfloat16, 0.0),
        pytest.param('frugal("120x", delay=1)', False, torch.float32, 256.0, marks=pytest.mark.slow),
        pytest.param("diloco(period=7, start=3)", False, torch.float32, 0.0, marks=pytest.mark.slow),
        pytest.param("post_local_sgd(period=8)", True, torch.float32, 0.0, marks=pytest.mark.slow),
    ],
)
def test_it_is_near_its_definition_and_the_same_on_all_workers(plan, ddp, dtype, scale):
    (here, metrics), *others = run_workers(_measured, 4, (plan, ddp, dtype, scale))
    assert here is not None and all(there == here for there, _ in others)
    noise = _Regression(0).noise
    assert here.noise == pytest.approx(noise, rel=0.2)
    assert here.worth == pytest.approx(worth(noise, 4), rel=0.1) == worth(here.noise, 4)
    assert (metrics["health_noise"], metrics["health_worth"]) == (here.noise, here.worth)


def _interrupted(worker: int) -> list[tuple[float | None, float | None]]:
    task = _Regression(worker)
    found = []

    def train(session: laconic.Session, steps: int) -> None:
        task.steps(steps)
        assert session.health is not None
        found.append((session.health.noise, session.health.worth))

    with laconic.attach(
        laconic.ddp(), task.model, task.optimizer, observers=[laconic.Guard("warn", every=1)]
    ) as session:
        train(session, 20)
        session.change(laconic.plan("streaming_diloco(period=2, fragments=2, delay=0)"))
        train(session, 8)  # too few
        train(session, 60)
        session.load_state_dict(session.state_dict())
        train(session, 8)
        train(session, 60)
    return found


def test_it_is_measured_anew_after_a_change_and_a_load():
    here, there = run_workers(_interrupted, 2)
    assert here == there
    assert [noise is None for noise, _ in here] == [False, True, False, True, False]
    for noise, _ in here[2::2]:
        assert noise == pytest.approx(_Regression(0).noise, rel=0.4)


@pytest.mark.parametrize("plan", ["ddp()", "diloco(period=2)", "post_local_sgd(period=2)"])
def test_one_worker_has_nothing_to_compare(plan):
    task = _Regression(0)
    with laconic.attach(plan, task.model, task.optimizer, observers=[laconic.Guard("warn", every=1)]) as session:
        task.steps(40)
        assert session.health is None or session.health.noise is session.health.worth is None
        assert "health_noise" not in session.metrics()


def _skipping(worker: int) -> Any:
    """Worker 1 skips its updates in most steps of a plan that averages weights."""
    task = _Regression(worker)
    guard = laconic.Guard("warn", every=1)
    with laconic.attach("diloco(period=4)", task.model, task.optimizer, observers=[guard]) as session:
        for step in range(160):
            if worker and step % 8 < 4:
                session.skip()
            else:
                task.steps(1)
        return session.health


def test_a_step_that_one_worker_skips_is_no_measurement():
    here, there = run_workers(_skipping, 2)
    assert here == there and here.noise == pytest.approx(_Regression(0).noise, rel=0.4)


def test_averages_are_taken_before_the_ratio_and_what_is_not_finite_does_not_count():
    average = NoiseAverage()
    for step in range(8):
        assert average.noise is None
        average.add(math.nan, 1.0, workers=2)
        average.add(3.0, 1.5 if step % 2 else 2.5, workers=2)  # |G|² of 0 and 2, as two workers measure 1
    assert average.noise == pytest.approx(2.0, rel=0.05)


def test_its_range():
    equal, opposed = NoiseAverage(), NoiseAverage()
    for _ in range(8):
        equal.add(1.0, 1.0, workers=4)
        opposed.add(1.0, 0.0, workers=4)
    assert (equal.noise, opposed.noise) == (0.0, MOST_NOISE)
    assert worth(0.0, 4) == 1.0 and worth(MOST_NOISE, 4) == pytest.approx(4, rel=0.01)
