"""The guard: what it measures, when it logs, and that all workers act as one."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.codecs import Exact
from laconic.codecs.feedback import residuals_by_name
from laconic.exchange import Peers, drive
from laconic.guard import SKETCH, Measurement, Signs, SketchCodec, health_of
from tests.session.models import assert_equal_bits, weights
from tests.workers import run_workers


def test_sketches_tell_norms_of_means():
    torch.manual_seed(0)
    common = {"a": torch.randn(300, 200), "b": torch.randn(7)}
    rows = []
    for worker in range(4):
        own = {name: t + 2 * torch.randn(t.shape, generator=_seeded(worker + 1)) for name, t in common.items()}
        state = {"residual": {"a": 3 * common["a"]}}
        rows.append(_row_of(own, state))
    health = health_of(rows, step=5)
    assert health is not None
    assert health.residual == pytest.approx(3 / 2**0.5, rel=0.2)  # the mean has the noise of 4 workers: 1 + 4 / 4
    assert health.error == pytest.approx(3 / (16 + 1) ** 0.5, rel=0.2)
    assert health.agreement == pytest.approx(2 / 5, rel=0.3)
    assert health.norm == pytest.approx((2 * 60007) ** 0.5, rel=0.2)
    nan = health_of([[1, *torch.full([3 * SKETCH], torch.nan).view(torch.int64)]], 1)
    assert health.finite and nan is not None and not nan.finite


def _row_of(tensors: dict[str, Tensor], state: dict[str, Any]) -> list[int]:
    """Sketch an exchange of one worker."""
    measurement = Measurement.of(laconic.ddp(), 1, Signs())
    exchange = SketchCodec(Exact(), measurement).average(tensors, state, Peers(0, 1))
    drive(exchange, lambda mean: mean.x)  # type: ignore[union-attr]
    return measurement.row()


@pytest.mark.parametrize("columns", [64, 128, 256, 768])
def test_the_norm_of_a_gradient_whose_rows_are_parallel_is_found(columns):
    gradient = {
        "weight": torch.outer(torch.randn(512, generator=_seeded(1)), torch.randn(columns, generator=_seeded(2)))
    }
    signs, norm = Signs(), float(gradient["weight"].norm())
    found = torch.stack([signs.sketch(gradient, step, torch.device("cpu")).norm() for step in range(50)]) / norm
    assert found.square().mean() == pytest.approx(1.0, rel=0.1)  # also over steps
    assert found.std() < 0.2


def test_a_worker_whose_exchanges_were_dropped_makes_no_measurement():
    row = _row_of({"a": torch.ones(300)}, {})
    assert health_of([row, row], 1) is not None
    assert health_of([row, [0] * len(row)], 1) is None
    assert health_of([[0] * len(row)] * 2, 1) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_is_sketched_in_fp32_or_wider(dtype):
    x = 3000 * torch.randn(2_000_003, generator=_seeded(0))
    wide = health_of([_row_of({"a": x.to(dtype).float()}, {})], 1)
    health = health_of([_row_of({"a": x.to(dtype)}, {})], 1)
    assert health is not None and wide is not None and health.finite  # 7800 rows: the sums are beyond fp16
    assert health.norm == pytest.approx(wide.norm, rel=1e-5)


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


class _Held(laconic.StepObserver):
    """Holds the queue's thread of worker 0 until its training is past a step; worker 1's waits for nothing."""

    def __init__(self, worker: int, step: int) -> None:
        self.worker, self.step = worker, step
        self.entered, self.past = threading.Event(), threading.Event()

    def attached(self, session: laconic.Session) -> None:
        session.wrap_codec(lambda codec: HeldCodec(codec, self) if session.ledger.step == self.step else codec)

    def after_step(self, session: laconic.Session) -> None:
        if session.step == self.step:
            if self.worker:
                assert self.entered.wait(30)
            else:
                self.past.set()


@dataclass(frozen=True, eq=False)
class HeldCodec:
    codec: laconic.Codec
    by: _Held

    def accepts(self, shape: torch.Size) -> bool:
        return self.codec.accepts(shape)

    def average(self, tensors: Any, state: Any, peers: Any, *, reuse: bool = False) -> Any:
        if not self.by.worker:
            assert self.by.past.wait(30)
        exchange = self.codec.average(tensors, state, peers, reuse=reuse)
        self.by.entered.set()
        return exchange


def _late(worker: int, step: int) -> list[laconic.Health]:
    model = nn.Linear(48, 48)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    plan = "Plan(Streaming(period=3, fragments=1, delay=1), ErrorFeedback(Quantized(2)))"
    held, seen = _Held(worker, step), []
    guard = laconic.Guard("warn", every=4)
    # On worker 0 the thread waits until the guard has seen the step, on worker 1 the guard waits for the thread.
    observers = [held, guard] if worker else [guard, held]
    with laconic.attach(plan, model, optimizer, observers=observers, sync_initial=True, timeout_s=20) as session:
        for _ in range(16):
            model(torch.randn(4, 48)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.health is not None and session.health not in seen:
                seen.append(session.health)
    return seen


@pytest.mark.parametrize("step", [3, 6])
def test_what_is_measured_follows_from_the_step_however_late_a_thread_is(step):
    here, there = run_workers(_late, 2, (step,))
    assert here == there and [each.step for each in here] == [7, 13]  # sent at 6 and 12


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
