"""`Log` and its makers: who writes, when and what; training is the same without it; and docs/metrics.md."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.integrations.log import Log, TensorBoard, Wandb
from laconic.session.metrics import METRICS
from tests.session.models import assert_equal_bits, weights
from tests.workers import run_workers

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
PLAN, STEPS, EVERY = "power_sgd(rank=1, bits=4)", 10, 4
WRITTEN = [4, 8, 10]
"""The steps at which metrics are written."""
QUIET_WANDB = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "DO_NOT_TRACK": "1"}


def _train(worker: int, all_workers: bool | None) -> dict[str, Any]:
    """Train with a log on worker 0 or on all, None for none; return what it wrote, and the truth."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    written: list[tuple[int, dict[str, float]]] = []
    losses = {}
    with laconic.attach(laconic.plan(PLAN), model, optimizer, observers=[laconic.Guard("warn", every=2)]) as session:
        if all_workers is not None:
            log = Log(lambda metrics, step: written.append((step, metrics)), every=EVERY, all_workers=all_workers)
            session.observe(log)
        for step in range(1, STEPS + 1):
            x = torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + worker))
            loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.item()
            session.report(loss=loss)
        last = session.metrics()
    totals = {key: (t.collectives, t.wire_bytes) for key, t in session.ledger.all_totals().items()}
    return {"written": written, "losses": losses, "last": last, "totals": totals, "weights": weights(module)}


def test_worker_0_writes_every_few_steps_and_at_the_end():
    first, second = run_workers(_train, 2, (False,))
    assert second["written"] == []
    assert [step for step, _ in first["written"]] == WRITTEN
    losses = {step: metrics["loss"] for step, metrics in first["written"]}
    assert losses == {step: first["losses"][step] for step in WRITTEN}
    _, last = first["written"][-1]
    assert last == first["last"] | {"wait_seconds": last["wait_seconds"]}
    sent = sum(sent for _, sent in first["totals"].values())
    assert sum(value for key, value in last.items() if key.startswith("wire_bytes/")) == sent


def test_training_and_traffic_are_the_same_without_it():
    without = run_workers(_train, 2, (None,))
    for logged, alone in zip(run_workers(_train, 2, (True,)), without, strict=True):
        assert [step for step, _ in logged["written"]] == WRITTEN, "each worker writes"
        assert logged["totals"] == alone["totals"]
        assert_equal_bits([logged["weights"], alone["weights"]])


def _train_alone(*logs: Log, steps: int = 3) -> laconic.Session:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.ddp(), model, optimizer) as session:
        for log in logs:
            session.observe(log)
        for step in range(1, steps + 1):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            session.report(loss=float(step))
    return session


def test_without_reports_it_writes_before_the_next_step():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    written = []
    with laconic.attach(laconic.ddp(), model, optimizer) as session:
        session.observe(Log(lambda metrics, step: written.append((metrics["step"], step)), every=2))
        for _ in range(4):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    assert written == [(2, 2), (4, 4)]


def test_a_write_that_fails_does_not_stop_the_training(caplog):
    def write(metrics: dict[str, float], step: int) -> None:
        raise OSError("no space left on device")

    with caplog.at_level(logging.WARNING):
        assert _train_alone(Log(write, every=1)).step == 3
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("laconic.integrations")]
    assert lines == ["Log: metrics could not be written: no space left on device. Training goes on."]


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match=r"Log\('runs'\): write must be a function of metrics and step, such as lambda"):
        Log("runs")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Log\(every=0\): every must be a whole number of at least 1\. Use 10"):
        TensorBoard("x", every=0)


def test_the_docs_table_is_the_table_of_metrics():
    rows = []
    for metric in METRICS.values():
        labels = f" by {', '.join(metric.labels)}" if metric.labels else ""
        rows.append(f"| `{metric.name}`{labels} | {metric.kind} | {metric.help} |")
    assert re.findall(r"^\| `.*\|$", PAGE.read_text(), re.M) == rows


def _run_page(folder: Path, kinds: tuple[str, ...], before: str = "", after: str = "") -> None:
    """Run the blocks of docs/metrics.md of these kinds in one program, with other lines before and after them."""
    blocks = re.findall(r"^```python(?: (\w+))?\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    program = [block for kind, block in blocks if kind in kinds]
    assert len(program) >= 2
    (folder / "page.py").write_text("\n".join([before, *program, after]))
    there = os.environ | QUIET_WANDB | {"PYTHONPATH": os.pathsep.join(sys.path), "LOCAL_RANK": "100"}
    there |= {"MLFLOW_TRACKING_URI": f"file:{folder}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=folder, env=there, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "could not be written" not in done.stderr


@pytest.mark.slow
def test_files_as_docs_metrics_says(tmp_path):
    _run_page(tmp_path, ("", "csv"))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert [line.split(",")[0] for line in (tmp_path / "loss.csv").read_text().splitlines()] == ["10", "20"]


@pytest.mark.frameworks
def test_tools_as_docs_metrics_says(tmp_path):
    if missing := [
        p for p in ("tensorboard", "wandb", "mlflow", "prometheus_client", "opentelemetry.sdk") if not _has(p)
    ]:
        pytest.skip(f"not installed: {missing}")
    check = """
exported = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics[0].data.data_points
assert {point.attributes["key"]: point.value for point in exported}["step"] == 20
import urllib.request
assert 'laconic{key="step"} 20.0' in urllib.request.urlopen("http://127.0.0.1:9564/metrics").read().decode()
(run,) = mlflow.search_runs(output_format="list")
assert run.data.metrics["step"] == 20 and run.data.metrics["loss"] > 0
"""
    provider = """
from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
reader = InMemoryMetricReader()
set_meter_provider(MeterProvider([reader]))
"""
    _run_page(tmp_path, ("", "frameworks"), provider, check)
    assert list(tmp_path.glob("runs/power_sgd/events*")) and list(tmp_path.glob("wandb/offline-run-*"))


def _has(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.frameworks
def test_tensorboard_reads_back_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _train_alone(TensorBoard(tmp_path / "runs", every=2), steps=5)
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    assert [(p.step, p.value) for p in events.Scalars("laconic/loss")] == [(2, 2.0), (4, 4.0), (5, 5.0)]
    assert [p.value for p in events.Scalars("laconic/step")] == [2, 4, 5]
    assert [p.step for p in events.Scalars("laconic/loss_against_bytes")] == [0, 0, 0]  # one worker sends nothing


@pytest.mark.frameworks
def test_wandb_joins_the_rows_of_a_run_of_ones_own(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name, value in QUIET_WANDB.items():
        monkeypatch.setenv(name, value)
    rows: list[dict[str, float]] = []
    with wandb.init(project="mine", dir=str(tmp_path)) as mine:
        monkeypatch.setattr(mine, "log", lambda row, commit=None: rows.append({"commit": commit, **row}))
        _train_alone(Wandb(every=1))
    assert [(row["laconic/step"], row["commit"], row["laconic/megabytes_sent"]) for row in rows] == [
        (1, False, 0.0),
        (2, False, 0.0),
        (3, False, 0.0),
    ]
