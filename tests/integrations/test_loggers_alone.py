"""Loggers in one process: what they refuse, how they fail and end, and what docs/metrics.md says of them."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import urllib.error

import pytest
import torch
from torch import nn

import laconic
from laconic.session.metrics import METRICS
from tests.integrations.loggers import BOARD, QUIET_WANDB, ROOT, offline_run, scrape

pytestmark = pytest.mark.frameworks
for package in ("tensorboard", "wandb", "mlflow", "prometheus_client", "opentelemetry.sdk"):
    pytest.importorskip(package)

PAGE = ROOT / "docs" / "metrics.md"


def test_the_server_ends_with_the_session():
    from laconic.integrations.prometheus import PrometheusServer

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    server = PrometheusServer(port=0)
    with laconic.attach(laconic.ddp(), model, optimizer) as session:
        session.observe(server)
        with pytest.raises(OSError, match=r"PrometheusServer\(port=\d+, host='127.0.0.1'\): .* Choose a port"):
            session.observe(PrometheusServer(server.port))
        scrape(server.port)
    with pytest.raises(urllib.error.URLError):
        scrape(server.port)


def test_a_run_of_ones_own_keeps_its_steps(tmp_path, monkeypatch):
    import wandb

    from laconic.integrations.wandb import WandB

    for name, value in QUIET_WANDB.items():
        monkeypatch.setenv(name, value)
    mine = wandb.init(project="mine", dir=str(tmp_path))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.ddp(), model, optimizer) as session:
        session.observe(WandB(mine, every=1))
        for step in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            session.report(loss=1.0)
            mine.log({"own": step})
    mine.finish()
    wandb.teardown()  # only then has W&B's own process written everything
    rows, _, _ = offline_run(tmp_path)
    assert [(row["own"], row["laconic/step"], row["laconic/loss"]) for row in rows] == [
        (0, 1, 1.0),
        (1, 2, 1.0),
        (2, 3, 1.0),
    ]


def test_a_logger_that_fails_does_not_stop_the_training(tmp_path, caplog):
    from laconic.integrations.prometheus import PrometheusTextfile

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.ddp(), model, optimizer) as session, caplog.at_level(logging.WARNING):
        session.observe(PrometheusTextfile(tmp_path / "missing" / "x.prom", every=1))
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    assert session.step == 3
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("laconic")]
    assert line.startswith("PrometheusTextfile: metrics could not be written:") and line.endswith("Training goes on.")


def test_wrong_arguments_are_refused():
    from laconic.integrations.mlflow import MLflow
    from laconic.integrations.prometheus import PrometheusServer, PrometheusTextfile
    from laconic.integrations.tensorboard import TensorBoard
    from laconic.integrations.wandb import WandB

    with pytest.raises(ValueError, match=r"TensorBoard\(every=0\): it must be a whole number of steps above 0"):
        TensorBoard("x", every=0)
    with pytest.raises(TypeError, match=r"WandB\(None\): the first argument is the name of a project, or a run"):
        WandB(None)
    with pytest.raises(ValueError, match=r"MLflow\(run_id='a', all_workers=True\): .* Leave out run_id"):
        MLflow(run_id="a", all_workers=True)
    with pytest.raises(ValueError, match=r"PrometheusServer\(port=-1\): a port is between 0 and 65535"):
        PrometheusServer(-1)
    with pytest.raises(ValueError, match=r"PrometheusTextfile\('x.txt'\): .* ends in .prom"):
        PrometheusTextfile("x.txt")


def test_the_docs_table_is_the_table_of_metrics():
    from laconic.integrations.opentelemetry import opentelemetry_name
    from laconic.integrations.prometheus import prometheus_name

    rows = []
    for metric in METRICS.values():
        labels = f" by {', '.join(metric.labels)}" if metric.labels else ""
        unit = f" ({metric.unit})" if metric.unit else ""
        names = f"`{prometheus_name(metric)}` | `{opentelemetry_name(metric)}`{unit}"
        rows.append(f"| `{metric.name}`{labels} | {metric.help} | {names} |")
    assert re.findall(r"^\| `.*\|$", PAGE.read_text(), re.M) == rows


def test_the_docs_examples_run(tmp_path):
    """All blocks in one program, those of `python frameworks`, too."""
    blocks = re.findall(r"^```python( frameworks)?\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert sum(bool(kind) for kind, _ in blocks) == 5, "one for each logger"
    (tmp_path / "page.py").write_text("\n".join(block for _, block in blocks))
    there = os.environ | QUIET_WANDB | {"PYTHONPATH": str(ROOT)}
    run = [sys.executable, "page.py"]
    done = subprocess.run(run, cwd=tmp_path, env=there, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "laconic.residual.norm" in done.stdout, "OpenTelemetry's console"
    assert list(tmp_path.glob("runs/power_sgd/events*")) and list(tmp_path.glob("wandb/offline-run-*"))
    assert (tmp_path / "mlflow.db").exists() and "laconic_residual_norm" in (tmp_path / "laconic.prom").read_text()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_prometheus_itself_parses_the_dashboards_queries(tmp_path):
    board = json.loads(BOARD.read_text())
    rules = [
        {
            "record": f"laconic:panel{panel['id']}:{target['refId']}",
            "expr": target["expr"].replace("$__rate_interval", "1m"),
        }
        for panel in board["panels"]
        for target in panel["targets"]
    ]
    (tmp_path / "rules.json").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))  # JSON is YAML
    done = subprocess.run(
        ["promtool", "check", "rules", "rules.json"], cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0 and f"{len(rules)} rules found" in done.stdout, done.stdout + done.stderr
