"""The guard beside everything else: dtypes, accumulation, NaN, fragments in flight, changes, resumes, more workers."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.exchange import Averaged, Exchange
from laconic.guard import Measurement, strengths
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.session.sharding import sharded, two_by_two
from tests.workers import run_workers

LATE = "Plan(Streaming(period=4, fragments=4, delay=1), ErrorFeedback(Quantized(1)))"
"""A fragment is in flight after every step."""
FEW_BITS = "quantized_ddp(bits=1)"


@dataclass(frozen=True)
class Case:
    plan: str = LATE
    ddp: bool = False
    mode: Any = "warn"
    dtype: torch.dtype = torch.float32
    accumulate: int = 1
    frozen: bool = False
    nan_at: int = 0
    changed_at: int = 0
    saved_at: int = 0
    """The step after which everything is saved, and loaded by another session."""
    steps: int = 20


CASES = {
    "fp32": Case(),
    "bf16": Case(dtype=torch.bfloat16),
    "fp16": Case(dtype=torch.float16),
    "fp16, gradients": Case(FEW_BITS, dtype=torch.float16),
    "fp16, DDP": Case("power_sgd(rank=2)", ddp=True, dtype=torch.float16),
    "bf16, DDP": Case(FEW_BITS, ddp=True, dtype=torch.bfloat16),
    "accumulation": Case(accumulate=3),
    "accumulation, DDP": Case(FEW_BITS, ddp=True, accumulate=3),
    "frozen": Case(frozen=True),
    "frozen, DDP": Case("power_sgd(rank=2)", ddp=True, frozen=True),
    "NaN": Case(nan_at=9),
    "NaN in a measured step": Case(FEW_BITS, nan_at=8),
    "NaN, DDP": Case(FEW_BITS, ddp=True, nan_at=8),
    "120x": Case('frugal("120x", delay=1)', steps=40),
    "long delay": Case("Plan(Streaming(8, 2, delay=7), ErrorFeedback(Quantized(2)))", steps=40),
    "changed by hand in flight": Case(changed_at=6),
    "act": Case(mode="act"),
    "act, bf16": Case(mode="act", dtype=torch.bfloat16),
    "act, DDP": Case(FEW_BITS, ddp=True, mode="act", steps=50),
    "act, accumulation and frozen": Case(mode="act", accumulate=2, frozen=True),
    "act, NaN": Case(mode="act", nan_at=6),
    "saved in flight": Case(saved_at=9),
    "saved, DDP": Case("power_sgd(rank=2)", ddp=True, saved_at=9),
    "act, saved": Case(mode="act", saved_at=15, steps=30),
}


def _run(worker: int, case: Case) -> dict[str, Any]:
    module = mlp().to(case.dtype)
    if case.frozen:
        module[0].requires_grad_(False)
    model: nn.Module = DistributedDataParallel(module) if case.ddp else module
    guard = laconic.Guard(case.mode, every=2, limit=1e-6 if case.mode == "act" else 1.5)
    plan, step, plans, steps = laconic.plan(case.plan), 0, [], set()
    saved: dict[str, Any] | None = None
    while step < case.steps:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with laconic.attach(plan, model, optimizer, observers=[guard]) as session:
            if saved is not None:
                module.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                session.load_state_dict(saved["session"])
            while step < case.steps and (saved is not None or step != case.saved_at or not step):
                _step(worker, case, model, optimizer, step)
                step += 1
                plans.append(repr(session.plan))
                if session.health is not None:
                    steps.add(session.health.step)
                    assert session.health.finite
                assert len(session._observers[-1]._pending) <= 2  # type: ignore[attr-defined]
                if step == case.changed_at:
                    assert session.in_flight
                    session.change(laconic.plan("Plan(Streaming(4, 4, delay=1), ErrorFeedback(Quantized(4)))"))
            plan = session.plan
            saved = copy.deepcopy(
                {
                    "model": module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "session": session.state_dict(),
                }
            )
            session.average_weights()
            found = {"health": session.health, "plans": plans, "steps": steps, "weights": weights(module)}
    return found


def _step(worker: int, case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    for micro in range(case.accumulate):
        x, y = batch(worker, 100 * step + micro)
        last = micro == case.accumulate - 1
        with contextlib.nullcontext() if last or not case.ddp else model.no_sync():  # type: ignore[operator]
            loss = F.cross_entropy(model(x.to(case.dtype)).float(), y)
            (loss * (torch.nan if worker == 1 and step + 1 == case.nan_at else 1.0)).backward()
    optimizer.step()


def _all(worker: int, names: list[str]) -> dict[str, Any]:
    logging.getLogger("laconic").setLevel(logging.ERROR)
    return {name: _run(worker, CASES[name]) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("chosen", [list(CASES)[i::3] for i in range(3)], ids=["first", "second", "third"])
def test_it_measures_and_all_workers_go_on_alike(workers, chosen):
    first, *others = run_workers(_all, workers, (chosen,), timeout_s=240)
    for name, here in first.items():
        case = CASES[name]
        assert here["health"] is not None, name
        assert here["health"].residual > 0 or case.mode == "act", name  # an exact codec has none
        assert len(here["steps"]) >= 2, name
        assert (len(set(here["plans"])) > 1) == (case.mode == "act" or case.changed_at > 0), name
        for there in others:
            assert here["health"] == there[name]["health"], name
            assert here["plans"] == there[name]["plans"] and here["steps"] == there[name]["steps"], name
        assert_equal_bits([here["weights"], *(there[name]["weights"] for there in others)])


WEAK = [
    "power_sgd(rank=1)",
    "quantized_ddp(bits=1)",
    "diloco(period=2, codec=ErrorFeedback(Quantized(1)))",
    "streaming_diloco(period=4, codec=ErrorFeedback(Quantized(1)))",
    "sparse_loco(period=2)",
    'frugal("8x")',
    'frugal("60x", delay=1)',
    'frugal("300x")',
]


def _acted(worker: int) -> list[tuple[str, str]]:
    """Return the plan that each was attached as, and the one that it became."""
    logging.getLogger("laconic").setLevel(logging.ERROR)
    found = []
    for text in WEAK:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        guard = laconic.Guard("act", every=1, limit=1e-3, budget=0.9)
        with laconic.attach(text, model, optimizer, observers=[guard]) as session:
            weak = session.plan
            for step in range(300):  # the last one is measured once in 117 steps
                if session.plan == weak:
                    _step(worker, Case(), model, optimizer, step)
            found.append((repr(weak), repr(session.plan)))
    return found


@pytest.mark.slow
def test_every_weak_named_plan_becomes_one_of_the_stronger_ones():
    here, there = run_workers(_acted, 2, timeout_s=170)
    assert here == there
    for weak, plan in here:
        assert laconic.plan(plan) in strengths(laconic.plan(weak)), weak


def _measured_names(worker: int, plan: str, every: int, steps: int) -> tuple[list[set[str]], list[int]]:
    seen: list[set[str]] = []
    plain = Measurement.row

    def row(self: Measurement) -> list[int]:
        seen.append({name for names in self.sums for name in names})
        return plain(self)

    Measurement.row = row  # type: ignore[method-assign]
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    at = []
    with laconic.attach(plan, model, optimizer, observers=[laconic.Guard("warn", every=every)]) as session:
        for step in range(steps):
            _step(worker, Case(), model, optimizer, step)
            if session.health is not None and session.health.step == session.step:
                at.append(session.step)
    return seen, at


@pytest.mark.parametrize(
    ("plan", "every", "at"),
    [
        (LATE, 4, [8, 12, 16, 20, 24, 28]),  # 4 to 7 arrive by 8
        pytest.param(LATE, 1, [5, 9, 13, 17, 21, 25, 29], marks=pytest.mark.slow),
        ("Plan(Streaming(4, 4, delay=3), ErrorFeedback(Quantized(1)))", 4, [10, 14, 18, 22, 26, 30]),
        pytest.param(
            "Plan(Streaming(8, 4, delay=1), ErrorFeedback(Quantized(1)))", 4, [12, 20, 28], marks=pytest.mark.slow
        ),
        pytest.param("Plan(Streaming(8, 4), ErrorFeedback(Quantized(1)))", 4, [11, 19, 27], marks=pytest.mark.slow),
        ("Plan(Streaming(4, 4, delay=1, start=9), ErrorFeedback(Quantized(1)))", 4, [4, 8, 16, 20, 24, 28]),
    ],
)
def test_a_measurement_of_a_streaming_plan_covers_all_fragments(plan, every, at):
    (here, steps), (there, _) = run_workers(_measured_names, 2, (plan, every, 30))
    assert steps == at and len(here) == len(at)
    names = {name for name, _ in mlp().named_parameters()}
    assert all(measured == names for measured in [*here, *there])


def _on_shards(worker: int, plan: str, mode: Any) -> Any:
    model = sharded(two_by_two())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with laconic.attach(plan, model, optimizer, observers=[laconic.Guard(mode, every=2)]) as session:
        for step in range(14):
            model(
                torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * step + worker))
            ).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return session.health


@pytest.mark.parametrize("plan", ["power_sgd(rank=2)", LATE])
def test_on_a_sharded_model_each_shard_is_measured(plan):
    healths = run_workers(_on_shards, 4, (plan, "warn"))
    assert healths[0] == healths[2] and healths[1] == healths[3] and healths[0] != healths[1]
    assert all(health is not None and health.residual > 0 for health in healths)


def _rolled_back(worker: int) -> Any:
    """Load an older state while a measurement is under way, and then another group's."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    alone = [dist.new_group([each]) for each in range(2)][worker]
    guard = laconic.Guard("warn", every=4)
    with laconic.attach(LATE, model, optimizer, group=alone, observers=[guard]) as session:
        for step in range(7 if worker else 2):
            _step(worker, Case(), model, optimizer, step)
        states: list[dict[str, Any]] = [{}, {}]
        dist.all_gather_object(states, session.state_dict() if worker else {})
        assert dist.group.WORLD is not None
        session.regroup(dist.group.WORLD)
        session.load_state_dict(states[1] | {"state": session.state_dict()["state"]})
        for part in range(4):
            saved = copy.deepcopy(session.state_dict())
            for step in range(6 + part):
                _step(worker, Case(), model, optimizer, step)
            assert session.health is None or part
            session.load_state_dict(saved)
        for step in range(10):
            _step(worker, Case(), model, optimizer, step)
        return session.step, session.health


def test_a_measurement_that_was_under_way_is_dropped_when_steps_start_again():
    here, there = run_workers(_rolled_back, 2)
    assert here == there and here[0] == 17 and here[1] is not None and here[1].step == 15


def _under_load(worker: int, rounds: int) -> list[Any]:
    """Attach and train `rounds` times, while both threads of each worker sleep at random."""
    found = []
    for number in range(rounds):
        chance = random.Random(1000 * worker + number)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        delay = number % 3 + 1
        plan = f"Plan(Streaming(4, {number % 4 + 1}, delay={delay}), ErrorFeedback(Quantized(2)))"
        guard = laconic.Guard("act", every=number % 5 + 1, limit=1.0)
        with laconic.attach(plan, model, optimizer, observers=[guard], timeout_s=30) as session:
            session.wrap_codec(partial(_SlowCodec, chance))
            for step in range(14):
                time.sleep(chance.choice([0, 0, 0, 0.005]))
                _step(worker, Case(), model, optimizer, step)
            found.append((session.health, repr(session.plan)))
    return found


@dataclass(frozen=True, eq=False)
class _SlowCodec:
    chance: random.Random
    codec: laconic.Codec

    def accepts(self, shape: torch.Size) -> bool:
        return self.codec.accepts(shape)

    def average(self, tensors: Any, state: Any, peers: Any, *, reuse: bool = False) -> Exchange[Averaged]:
        time.sleep(self.chance.choice([0, 0, 0, 0.01]))
        return (yield from self.codec.average(tensors, state, peers, reuse=reuse))


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(20, marks=pytest.mark.slow),
        pytest.param(200, marks=[pytest.mark.nightly, pytest.mark.timeout(900)]),
    ],
)
def test_threads_that_are_late_by_chance_disturb_nothing(rounds):
    here, there = run_workers(_under_load, 2, (rounds,), timeout_s=60 + 4 * rounds)
    assert here == there and sum(health is not None for health, _ in here) > rounds // 2
