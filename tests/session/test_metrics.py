"""The metrics of a session: they are the ledger's numbers, they never fall, and nothing is sent for them."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.codecs.feedback import residuals_by_name
from laconic.session.metrics import METRICS
from tests.session.models import assert_equal_bits, weights
from tests.workers import run_workers

PLANS = [
    "power_sgd(rank=1)",
    "diloco(period=2)",
    "streaming_diloco(period=4, fragments=2, delay=1)",
    "hierarchical_sgd({1: 2, 2: 4})",
    "ddp()",
    "alone()",
]


def _train(worker: int, plan: str, measure: bool, ddp: bool = False, steps: int = 8) -> dict[str, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
    model: nn.Module = DistributedDataParallel(module) if ddp else module
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    seen: list[dict[str, float]] = []
    with laconic.attach(laconic.plan(plan), model, optimizer, observers=[laconic.Guard("warn", every=2)]) as session:
        for step in range(steps):
            x = torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + worker))
            loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.report(loss=loss, validation=torch.tensor(0.5) if step == 3 else None)
            if measure:
                seen.append(session.metrics())
        state = session.state_dict()["state"]  # waits for fragments
        last, ledger = session.metrics(), session.ledger
        residuals = {phase: list(residuals_by_name(state[phase]).values()) for phase in ("gradient", "weights")}
        norms = {phase: float(torch.cat([t.flatten() for t in r]).norm()) for phase, r in residuals.items() if r}
        return {
            "seen": [*seen, last],
            "totals": {key: (t.collectives, t.wire_bytes, t.payload_bytes) for key, t in ledger.all_totals().items()},
            "by_level": {name: total.wire_bytes for name, total in ledger.totals(by="level").items()},
            "sums": (ledger.wire_bytes, ledger.payload_bytes, ledger.collectives, ledger.seconds),
            "waited_s": ledger.waited_s,
            "norms": norms,
            "health": session.health,
            "loss": loss.item(),
            "weights": weights(module),
        }


def _sum(metrics: dict[str, float], name: str) -> float:
    return math.fsum(value for key, value in metrics.items() if key.split("/")[0] == name)


@pytest.mark.parametrize("plan", PLANS)
def test_they_are_what_ledger_residuals_and_guard_say_and_counters_never_fall(plan):
    workers = 4 if "hierarchical" in plan else 2
    for found in run_workers(_train, workers, (plan, True)):
        last = found["seen"][-1]
        names = ("wire_bytes", "payload_bytes", "collectives", "flight_seconds")
        assert tuple(_sum(last, name) for name in names) == pytest.approx(found["sums"])
        assert (last["wait_seconds"] > 0) and last["wait_seconds"] <= found["waited_s"]  # the queue's thread adds to it
        for level, sent in found["by_level"].items():
            assert sum(v for k, v in last.items() if k.startswith(f"wire_bytes/{level}/")) == sent
        assert {k.split("/")[1]: v for k, v in last.items() if k.startswith("residual_norm/")} == pytest.approx(
            found["norms"]
        )
        assert bool(found["norms"]) == (plan[:5] in ("power", "diloc", "strea"))
        health = {key.removeprefix("health_"): v for key, v in last.items() if key.startswith("health_")}
        assert (found["health"] is None) == (plan == "alone()")
        known = {} if found["health"] is None else vars(found["health"])
        assert health == {k: v for k, v in known.items() if k != "step" and v is not None}
        assert (last["step"], last["workers"], last["validation_loss"]) == (8, workers, 0.5)
        assert last["loss"] == pytest.approx(found["loss"])
        counters = [k for k in last if METRICS[k.split("/")[0]].kind == "counter"]
        assert len(counters) > 4
        for key in counters:
            values = [each.get(key, 0) for each in found["seen"]]
            assert values == sorted(values), key


@pytest.mark.parametrize("plan", ["power_sgd(rank=1)", "streaming_diloco(period=4, fragments=2, delay=1)"])
@pytest.mark.parametrize("ddp", [True, False])
def test_nothing_is_sent_for_them_and_training_does_not_notice(plan, ddp):
    without, _ = run_workers(_train, 2, (plan, False, ddp))
    watched, _ = run_workers(_train, 2, (plan, True, ddp))
    assert watched["totals"] == without["totals"]
    assert_equal_bits([watched["weights"], without["weights"]])


def _late(worker: int, kind: str, plan: str) -> float:
    """Worker 1 sleeps before each backward; the other one must wait for it."""
    module = nn.Linear(8, 8)
    model: nn.Module = DistributedDataParallel(module) if kind == "ddp" else module
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with laconic.attach(laconic.plan(plan), model, optimizer) as session:
        at_start = session.metrics()["wait_seconds"]
        for _ in range(4):
            loss = model(torch.ones(2, 8)).sum()
            if worker == 1:
                time.sleep(0.25)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return session.metrics()["wait_seconds"] - at_start


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("ddp", "ddp()"),
        pytest.param("bare", "ddp()", marks=pytest.mark.slow),
        pytest.param("bare", "diloco(period=2)", marks=pytest.mark.slow),
        ("bare", "streaming_diloco(period=2, fragments=1, delay=1)"),
    ],
)
def test_the_worker_that_is_early_has_waited(kind, plan):
    early, late = run_workers(_late, 2, (kind, plan))
    assert early > late


def test_a_world_of_one_waits_for_nobody_and_sends_nothing():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = laconic.power_sgd(rank=1)
    with laconic.attach(plan, model, optimizer) as session:
        session.wrap_codec(lambda _: plan.codec)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        found = session.metrics()
    assert (found["step"], found["workers"], found["wait_seconds"]) == (1, 1, 0)
    assert _sum(found, "wire_bytes") == 0
    assert "loss" not in found and "residual_norm/gradient" in found
    assert session.metrics()["step"] == 1  # also when it is detached


def test_a_function_that_validates_is_not_called_and_no_graph_is_kept():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.ddp(), model, optimizer) as session:
        loss = model(torch.ones(1, 4)).sum()
        assert session.report(loss=loss, validation=lambda: pytest.fail("called")) is False
        found = session.metrics()
        assert found["loss"] == loss.item() and "validation_loss" not in found
        assert not any(t.requires_grad for t in session._reported.last.values() if isinstance(t, torch.Tensor))


def test_the_table_is_one_of_clean_names():
    for name, metric in METRICS.items():
        assert metric.name == name == name.lower() and "/" not in name
        assert metric.help.endswith(".") and metric.unit in ("", "By", "s")
        assert name.endswith({"By": "_bytes", "s": "_seconds", "": ""}[metric.unit])


def _noted(worker: int, folder: str) -> tuple[list[str], Any]:
    model = nn.Linear(48, 48, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ledger = laconic.Ledger(Path(folder) / f"{worker}.jsonl")
    guard = laconic.Guard("warn", every=2)
    with laconic.attach(laconic.power_sgd(rank=1), model, optimizer, ledger=ledger, observers=[guard]) as session:
        for _ in range(6):
            model(torch.randn(64, 48)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ledger.close()
        return list(ledger.jsonl()), session.health


def test_the_guards_measures_are_in_the_ledger_beside_the_collectives(tmp_path):
    for worker, (lines, health) in enumerate(run_workers(_noted, 2, (str(tmp_path),))):
        rows = [json.loads(line) for line in lines]
        notes = [row for row in rows if row.get("note") == "health"]
        assert [row["step"] for row in notes] == [2, 4, 6]
        assert notes[-1] == {"note": "health", **vars(health)}
        assert rows.index(notes[0]) > max(i for i, row in enumerate(rows) if row["step"] == 2 and "op" in row)
        written = (tmp_path / f"{worker}.jsonl").read_text().splitlines()
        assert sorted(written) == sorted(lines)
        assert sum("op" in json.loads(line) for line in written) == len(rows) - len(notes)
