"""Decoupled momentum: the plan `demo()` with its optimizer, beside the algorithm in float64."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.codecs import TopDCT
from laconic.plans.plan import Plan
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import listen, run_workers

LR, DECAY, WEIGHT_DECAY, STEPS, KEPT = 0.01, 0.9, 0.1, 6, 12


class Matrix(nn.Module):
    """One block of 16 x 24 numbers in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64))

    def forward(self, step: int) -> Tensor:
        x = torch.randn(24, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        return torch.tanh(self.w @ x).sum()


def _cosines(size: int) -> Tensor:
    rows = [
        [math.sqrt((1 if k == 0 else 2) / size) * math.cos(math.pi * (2 * n + 1) * k / (2 * size)) for n in range(size)]
        for k in range(size)
    ]
    return torch.tensor(rows, dtype=torch.float64)


LEFT, RIGHT = _cosines(16), _cosines(24)


def _largest(t: Tensor, count: int) -> Tensor:
    """Keep the largest coefficients of a matrix."""
    coefficients = LEFT @ t @ RIGHT.T
    threshold = coefficients.abs().flatten().sort(descending=True).values[count - 1]
    return LEFT.T @ torch.where(coefficients.abs() >= threshold, coefficients, 0) @ RIGHT


def _reference(workers: int) -> Tensor:
    """Train in float64 as in arXiv:2411.19870, Algorithm 1, with steps by sign; all workers have the same gradients.

    Of two workers, the first owns the block: it averages its whole momentum with what the other sends, delivers twice
    as many coefficients of the mean, and keeps the rest.
    """
    model = Matrix()
    momenta = [torch.zeros(16, 24, dtype=torch.float64)] * workers
    for step in range(STEPS):
        model.zero_grad()
        model(step).backward()
        assert model.w.grad is not None
        momenta = [DECAY * each + model.w.grad for each in momenta]
        if workers == 1:
            q = _largest(momenta[0], KEPT)
            momenta = [momenta[0] - q]
        else:
            sent = _largest(momenta[1], KEPT)
            q = _largest((momenta[0] + sent) / 2, 2 * KEPT)
            momenta = [momenta[0] + sent - 2 * q, momenta[1] - sent]
        with torch.no_grad():
            model.w.copy_(model.w * (1 - LR * WEIGHT_DECAY) - LR * q.sign())
    return model.w.detach()


def _trained(worker: int) -> Tensor:
    model = Matrix()
    optimizer = laconic.optim.DeMo(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    plan = laconic.demo(fraction=KEPT / (16 * 24), bits=None, decay=DECAY)
    with laconic.attach(plan, model, optimizer) as session:
        for step in range(STEPS):
            model(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert bool(session.ledger.entries) == (session.workers > 1)
    return model.w.detach()


def test_a_world_of_one_follows_the_paper() -> None:
    torch.testing.assert_close(_trained(0), _reference(1), rtol=0, atol=1e-12)


def test_two_workers_follow_the_reference() -> None:
    for got in run_workers(_trained, 2):
        torch.testing.assert_close(got, _reference(2), rtol=0, atol=1e-12)


def _bad_step(worker: int, text: str, wrapped: bool, dtype: torch.dtype) -> list[Tensor]:
    """Return the weights after each step; the gradient of one worker is not finite in the third."""
    module = mlp().to(dtype)
    model: nn.Module = DDP(module, bucket_cap_mb=0.01) if wrapped else module
    optimizer = laconic.optim.DeMo(model.parameters(), lr=LR)
    trace = [weights(module)]
    with laconic.attach(text, model, optimizer, clip_norm=1.0) as session:
        for step in range(1, 6):
            before = _momentum(session)
            x, y = batch(worker, step)
            if (worker, step) == (1, 3):
                x[0, 0] = torch.nan
            F.cross_entropy(model(x.to(dtype)).float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            trace.append(weights(module))
            same = [torch.equal(t, before[name]) for name, t in _momentum(session).items() if step > 1]
            assert all(same) if step == 3 else not any(same)
        assert all(t.dtype == torch.float32 for t in _momentum(session).values())
        assert set(_momentum(session)) == {name for name, _ in module.named_parameters()}
    return trace


def _momentum(session: laconic.Session) -> dict[str, Tensor]:
    kept: dict[str, Any] = session.state_dict()["state"].get("gradient", {})
    return {name: t.clone() for name, t in kept.get("residual", {}).items()}


@pytest.mark.parametrize(
    ("text", "wrapped", "dtype"),
    [
        ("demo()", True, torch.float32),
        ("demo(fraction=0.1, bits=8, chunk=20)", False, torch.bfloat16),
        pytest.param("demo(bits=2)", True, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("demo(bits=None)", False, torch.float32, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_workers_stay_equal_and_a_bad_step_changes_nothing(text, wrapped, dtype, workers):
    results = run_workers(_bad_step, workers, (text, wrapped, dtype))
    for traces in zip(*results, strict=True):
        assert_equal_bits(list(traces))
    stood_still = [torch.equal(a, b) for a, b in pairwise(results[0])]
    assert stood_still == [False, False, True, False, False]
    if dtype == torch.float32:  # a clip shortens what is delivered, and the step is its sign
        for a, b in pairwise(results[0]):
            steps = (a - b).abs()
            assert ((steps < 1e-6) | ((steps - LR).abs() < 1e-6)).all()


def _said(worker: int, text: str, optimizer: str) -> str:
    said = listen()
    model = mlp()
    made: Any = {
        "DeMo": lambda: laconic.optim.DeMo(model.parameters()),
        "AdamW": lambda: torch.optim.AdamW(model.parameters()),
        "SGD": lambda: torch.optim.SGD(model.parameters(), lr=0.1),
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    }[optimizer]()
    laconic.attach(text, model, made).detach()
    return " ".join(said)


@pytest.mark.parametrize(
    ("text", "optimizer", "warning"),
    [
        ("demo()", "DeMo", ""),
        ("demo()", "SGD", ""),
        ("demo()", "AdamW", "the codec of demo(bits=4) keeps the momentum, and AdamW keeps moments of its own"),
        ("demo()", "momentum", "SGD keeps moments of its own"),
        ("ddp()", "DeMo", "DeMo steps by the sign of what ddp() delivers, without momentum"),
        ("ddp()", "AdamW", ""),
    ],
)
def test_momentum_twice_or_not_at_all_is_a_warning(text, optimizer, warning):
    said = run_workers(_said, 1, (text, optimizer))[0]
    assert warning in said and ("omentum" in said) == bool(warning)


def test_a_guard_does_not_take_momentum_for_a_lag() -> None:
    plan, seen = run_workers(_guarded, 2)[0]
    assert plan == "demo(bits=4)"
    assert seen > 1.0, "the guard would have acted on a residual of this length"


def _guarded(worker: int) -> tuple[str, float]:
    model = mlp()
    optimizer = laconic.optim.DeMo(model.parameters(), lr=LR)
    guard = laconic.Guard("act", limit=1.0, every=1)
    with laconic.attach("demo()", model, optimizer, observers=[guard]) as session:
        for step in range(12):
            x, y = batch(worker, step)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.health is not None
        return repr(session.plan), session.health.residual


def test_the_optimizer_keeps_nothing_and_runs_closures() -> None:
    p = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    z = nn.Parameter(torch.tensor([1 + 1j]))
    optimizer = laconic.optim.DeMo([{"params": [p], "weight_decay": 0.5}, {"params": [z]}], lr=0.25)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p * torch.tensor([4.0, -0.001, 0.0])).sum() + z.real.sum() - 2 * z.imag.sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == pytest.approx(4.0 - 0.002 + 1 - 2)
    assert p.tolist() == [1 * 0.875 - 0.25, 2 * 0.875 + 0.25, 3 * 0.875]
    assert z.tolist() == [0.75 + 1.25j]
    assert not optimizer.state_dict()["state"]
    optimizer.zero_grad()
    optimizer.step()  # no gradient, no step
    assert z.tolist() == [0.75 + 1.25j]


def test_the_optimizer_refuses_what_it_cannot_use() -> None:
    with pytest.raises(ValueError, match=r"DeMo\(lr=-1\): lr must be a number of at least 0"):
        laconic.optim.DeMo([nn.Parameter(torch.ones(1))], lr=-1)
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="a gradient is sparse, and momentum is dense"):
        laconic.optim.DeMo(table.parameters()).step()


def test_demo_is_feedback_with_decay_around_a_codec() -> None:
    plan = laconic.plan("demo(fraction=0.02, bits=8, decay=0.99)")
    assert plan == Plan(codec=laconic.ErrorFeedback(TopDCT(0.02, bits=8), decay=0.99))
