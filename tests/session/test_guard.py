"""The guard: what it measures, when it logs, and that all workers act as one."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.codecs.feedback import residuals_by_name
from laconic.guard import SKETCH, Sketcher, health_of
from tests.session.models import assert_equal_bits, weights
from tests.workers import run_workers


def test_sketches_tell_norms_of_means():
    torch.manual_seed(0)
    common = {"a": torch.randn(300, 200), "b": torch.randn(7)}
    rows = []
    for worker in range(4):
        probe = Sketcher()
        own = {name: t + 2 * torch.randn(t.shape, generator=_seeded(worker + 1)) for name, t in common.items()}
        state = {"residual": {"a": 3 * common["a"]}}
        exchange = probe.watch(own, state, lambda: iter(()))  # type: ignore[arg-type, return-value]
        with pytest.raises(StopIteration):
            next(exchange)
        rows.append(probe.take())
        assert probe.take() == []
    health = health_of(rows, step=5)
    assert health.residual == pytest.approx(3 / 2**0.5, rel=0.2)  # the mean has the noise of 4 workers: 1 + 4 / 4
    assert health.error == pytest.approx(3 / (16 + 1) ** 0.5, rel=0.2)
    assert health.agreement == pytest.approx(2 / 5, rel=0.3)
    assert health.norm == pytest.approx((2 * 60007) ** 0.5, rel=0.2)
    assert health.finite and not health_of([[*torch.full([3 * SKETCH], torch.nan).view(torch.int64)]], 1).finite


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _train(worker: int, kind: str, plan: str, guard: laconic.Guard | None, steps: int = 24) -> dict[str, Any]:
    """Gradients are the weights' distance from random targets, of full rank: what a low rank loses stays lost."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("laconic.guard").addHandler(handler)
    torch.manual_seed(0)
    module = nn.Linear(48, 48, bias=False)
    model: nn.Module = DistributedDataParallel(module) if kind == "ddp" else module
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.eye(48), torch.randn(48, 48, generator=_seeded(100))
    plans = []
    with laconic.attach(laconic.plan(plan), model, optimizer, observers=[guard] if guard else []) as session:
        for step in range(steps):
            noise = torch.randn(48, 48, generator=_seeded(10 * step + worker))
            ((model(x) - y - noise) ** 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            plans.append(repr(session.plan))
        health, left = session.health, residuals_by_name(session.state_dict()["state"])
        entries = [entry for entry in session.ledger.entries if entry.phase == "control"]
    return {"lines": lines, "plans": plans, "health": health, "weights": weights(module), "left": left, "all": entries}


WEAK = "power_sgd(rank=1, bits=None)"


@pytest.mark.parametrize("kind", ["ddp", "bare"])
def test_a_weak_plan_becomes_stronger_on_all_workers_within_the_budget(kind):
    guard = laconic.Guard("act", every=2, budget=0.4)
    here, there = run_workers(_train, 2, (kind, WEAK, guard))
    assert here["plans"] == there["plans"] and here["plans"][0] == WEAK
    assert_equal_bits([here["weights"], there["weights"]])
    assert here["health"] == there["health"]
    assert there["lines"] == []
    assert "power_sgd(rank=1, bits=None) is behind by" in here["lines"][0]
    assert "All workers go on with power_sgd(rank=8, bits=None)" in here["lines"][0]
    assert set(here["plans"]) == {WEAK, "power_sgd(rank=8, bits=None)"}  # rank 16 would be above the budget
    assert len(here["lines"]) <= 2  # once more, that the budget allows no more


def test_it_warns_once_and_changes_nothing():
    here, _ = run_workers(_train, 2, ("bare", WEAK, laconic.Guard("warn", every=2)))
    assert set(here["plans"]) == {WEAK}
    assert len(here["lines"]) == 1 and 'or Guard("act")' in here["lines"][0]


@pytest.mark.parametrize("plan", ["ddp()", "Plan(codec=ErrorFeedback(codec=Quantized(bits=8)))", "alone()"])
def test_healthy_plans_are_left_alone(plan):
    here, _ = run_workers(_train, 2, ("bare", plan, laconic.Guard("act", every=2)))
    assert set(here["plans"]) == {repr(laconic.plan(plan))}
    assert here["lines"] == []
    assert (here["health"] is None) == (plan == "alone()")


@pytest.mark.parametrize("schedule", ["Every(period=2)", "Streaming(period=4, fragments=1, delay=1)"])
def test_deltas_are_measured_and_get_a_stronger_codec(schedule):
    plan = f"Plan(schedule={schedule}, codec=ErrorFeedback(codec=LowRank(rank=1)))"
    here, there = run_workers(_train, 2, ("bare", plan, laconic.Guard("act", every=2, limit=0.5)))
    assert here["plans"] == there["plans"] and len(set(here["plans"])) > 1
    assert here["health"] == there["health"]


def _wrapped(worker: int) -> tuple[list[str], Tensor]:
    seen: list[str] = []

    def wrap(codec: laconic.Codec) -> laconic.Codec:
        seen.append(repr(codec))
        return laconic.Exact()

    model = nn.Linear(48, 48, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with laconic.attach("power_sgd(rank=1)", model, optimizer, sync_initial=True) as session:
        session.wrap_codec(wrap)
        before = weights(model)
        (model.weight * (worker + 1)).sum().backward()
        optimizer.step()
        return seen, before - weights(model)


def test_a_codec_may_be_wrapped():
    for seen, moved in run_workers(_wrapped, 2):
        assert seen and "LowRank(rank=1" in seen[0]
        torch.testing.assert_close(moved, torch.full_like(moved, 1.5))  # the exact mean of 1 and 2


def test_without_a_guard_nothing_is_measured_or_sent():
    here, _ = run_workers(_train, 2, ("ddp", WEAK, None))
    watched, _ = run_workers(_train, 2, ("ddp", WEAK, laconic.Guard("warn")))
    assert here["health"] is None and watched["health"] is not None
    extra = len(watched["all"]) - len(here["all"])
    assert extra == 1 + 6  # at attach; in 24 steps
    assert_equal_bits([here["weights"], watched["weights"]])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "on"}, r"Guard\('on'\): it must be \"warn\" or \"act\". Leave the guard out for none."),
        ({"budget": 0}, r"Guard\(budget=0\): it is a share of the bytes of ddp\(\)"),
        ({"limit": -1}, r"Guard\(limit=-1\): it must be a number above 0"),
        ({"every": 0}, r"Guard\(every=0\): it must be a whole number of steps"),
    ],
)
def test_wrong_guards_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        laconic.Guard(**wrong)
