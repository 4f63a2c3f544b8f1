"""Loggers, with the real packages: what they write is what the ledger says, and training does not notice them."""

from __future__ import annotations

import json
import logging
import os
import struct
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.session.metrics import METRICS
from tests.session.models import assert_equal_bits, weights
from tests.workers import run_workers

pytestmark = pytest.mark.frameworks
pytest.importorskip("tensorboard")
pytest.importorskip("wandb")
pytest.importorskip("mlflow")
pytest.importorskip("prometheus_client")
pytest.importorskip("opentelemetry.sdk")

PLAN = "power_sgd(rank=1, bits=4)"
STEPS, EVERY = 12, 4
WRITTEN = [1, 4, 8, 12]
"""The steps at which metrics are written."""


def listeners(folder: Path, all_workers: bool) -> dict[str, Any]:
    """One of each kind, of which each writes to its own place in the folder."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from laconic.integrations.mlflow import MLflow
    from laconic.integrations.opentelemetry import OpenTelemetry
    from laconic.integrations.prometheus import PrometheusServer, PrometheusTextfile
    from laconic.integrations.tensorboard import TensorBoard
    from laconic.integrations.wandb import WandB

    reader = InMemoryMetricReader()
    options: dict[str, Any] = {"every": EVERY, "all_workers": all_workers}
    made: dict[str, Any] = {
        "tensorboard": TensorBoard(folder / "tensorboard", **options),
        "wandb": WandB("laconic-tests", **options),
        "mlflow": MLflow("tests", tracking_uri=f"sqlite:///{folder}/mlflow.db", **options),
        "server": PrometheusServer(port=0, **options),
        "textfile": PrometheusTextfile(folder / "laconic.prom", **options),
        "opentelemetry": OpenTelemetry(MeterProvider([reader]), **options),
        "reader": reader,
    }
    if all_workers:
        del made["mlflow"]  # two processes cannot make one sqlite file
    return made


def train(worker: int, plan: str, folder: str, watched: bool, all_workers: bool = False) -> dict[str, Any]:
    """Train under a guard, with all listeners or with none; return the truth, and what can be read only here."""
    from laconic.integrations.listener import Listener

    made = listeners(Path(folder), all_workers) if watched else {}
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found: dict[str, Any] = {"losses": {}, "sent": {}, "metrics": {}, "texts": []}
    with laconic.attach(laconic.plan(plan), model, optimizer, guard=laconic.Guard("warn", every=2)) as session:
        for each in made.values():
            if isinstance(each, Listener):
                session.observe(each)
        for step in range(1, STEPS + 1):
            x = torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + worker))
            loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.report(loss=loss, validation=0.5 + step if step % 6 == 0 else None)
            found["losses"][step], found["sent"][step] = loss.item(), session.ledger.wire_bytes
            found["metrics"][step] = session.metrics()
            if watched and (worker == 0 or all_workers):
                found["texts"].append(scrape(made["server"].port))
    if watched:
        found["otel"] = observed(made["reader"])
    found["totals"] = {key: (t.collectives, t.wire_bytes) for key, t in session.ledger.all_totals().items()}
    found["weights"] = weights(module)
    return found


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def observed(reader: Any) -> list[tuple[str, str, dict[str, Any], float]]:
    data = reader.get_metrics_data()
    if data is None:
        return []
    return [
        (metric.name, metric.unit, dict(point.attributes), point.value)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """One run of two workers that all listeners have watched, on the first worker."""
    folder = tmp_path_factory.mktemp("loggers")
    return folder, run_workers(_quiet, 2, (PLAN, str(folder), True), timeout_s=150)


_ENVIRONMENT = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "DO_NOT_TRACK": "1"}


def _quiet(worker: int, *args: Any) -> dict[str, Any]:
    warnings.simplefilter("default")  # those of the packages are not ours
    os.environ.update(_ENVIRONMENT, WANDB_DIR=args[1])
    return train(worker, *args)


def labelled(metrics: dict[str, float], name: str) -> dict[tuple[str, ...], float]:
    return {tuple(key.split("/")[1:]): value for key, value in metrics.items() if key.split("/")[0] == name}


def test_training_and_traffic_are_the_same_without_listeners(run, tmp_path):
    _, watched = run
    alone = run_workers(_quiet, 2, (PLAN, str(tmp_path), False), timeout_s=60)
    for with_, without in zip(watched, alone, strict=True):
        assert with_["totals"] == without["totals"]
        assert_equal_bits([with_["weights"], without["weights"]])


def test_tensorboard_reads_back_what_the_session_measured(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, (first, _) = run
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    for key, value in first["metrics"][STEPS].items():
        if key.split("/")[0] not in ("loss", "validation_loss", "wait_seconds"):
            points = events.Scalars(f"laconic/{key}")
            assert [p.step for p in points] == [s for s in WRITTEN if key in first["metrics"][s]]
            assert points[-1].value == pytest.approx(value, rel=1e-6)
    loss = {p.step: p.value for p in events.Scalars("laconic/loss")}
    assert loss == pytest.approx({step: first["losses"][step] for step in WRITTEN}, rel=1e-6)
    against = {p.step: p.value for p in events.Scalars("laconic/loss_against_bytes")}
    assert against == pytest.approx({first["sent"][step]: first["losses"][step] for step in WRITTEN}, rel=1e-6)
    assert [(p.step, p.value) for p in events.Scalars("laconic/validation_loss")] == [(6, 6.5), (12, 12.5)]
    assert PLAN.encode() in events.Tensors("laconic/plan/text_summary")[0].tensor_proto.string_val[0]


def offline_run(folder: Path) -> tuple[list[dict[str, float]], dict[str, str], dict[str, Any]]:
    """Return the rows of the one offline run in a folder, the x axis of each metric, and the config."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows: list[dict[str, float]] = []
    axes: dict[str, str] = {}
    config: dict[str, Any] = {}
    for data in records(path.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("history"):
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
        elif record.HasField("metric"):
            axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif record.HasField("config"):
            config |= {item.key: json.loads(item.value_json) for item in record.config.update}
    return rows, axes, config


def records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, after W&B's header: blocks of 32 kB, with parts of records."""
    at, whole = 7, b""
    while at < len(content):
        if 32768 - at % 32768 < 7:  # too little for a header: padding
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or its last part
            yield whole
            whole = b""


def test_wandb_has_the_loss_against_megabytes(run):
    folder, (first, _) = run
    rows, axes, config = offline_run(folder)
    assert axes["laconic/loss_against_megabytes"] == "laconic/megabytes_sent"
    assert axes["laconic/*"] == "laconic/step"
    assert config["laconic_plan"] == PLAN
    against = {
        row["laconic/megabytes_sent"]: row["laconic/loss_against_megabytes"]
        for row in rows
        if "laconic/loss_against_megabytes" in row
    }
    assert against == pytest.approx({first["sent"][step] / 1e6: first["losses"][step] for step in WRITTEN})
    sent = {row["laconic/step"]: row for row in rows if "laconic/workers" in row}
    assert list(sent) == WRITTEN
    for labels, value in labelled(first["metrics"][STEPS], "wire_bytes").items():
        assert sent[STEPS]["/".join(("laconic/wire_bytes", *labels))] == value


def test_mlflow_has_the_loss_against_bytes(run):
    from mlflow.tracking import MlflowClient

    folder, (first, _) = run
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("tests")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.status, found.data.params["laconic_plan"]) == ("FINISHED", PLAN)
    history = client.get_metric_history(found.info.run_id, "laconic/loss_against_bytes")
    assert {m.step: m.value for m in history} == pytest.approx(
        {first["sent"][step]: first["losses"][step] for step in WRITTEN}
    )
    for labels, value in labelled(first["metrics"][STEPS], "wire_bytes").items():
        assert found.data.metrics["/".join(("laconic/wire_bytes", *labels))] == value
    assert "laconic/health_agreement" in found.data.metrics


def test_prometheus_scrapes_the_ledgers_bytes_and_counters_never_fall(run):
    from prometheus_client.parser import text_string_to_metric_families

    from laconic.integrations.prometheus import prometheus_name

    folder, (first, second) = run
    assert second["texts"] == [], "only the first worker serves"
    seen: dict[Any, list[float]] = {}
    for text in [*first["texts"], (folder / "laconic.prom").read_text()]:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                metric = METRICS[family.name.removeprefix("laconic_").removesuffix("_total")]
                assert (sample.name, family.type, family.documentation) == (
                    prometheus_name(metric),
                    metric.kind,
                    metric.help,
                )
                assert sample.labels.keys() == {"worker", *metric.labels} and sample.labels["worker"] == "0"
                key = (sample.name, *(sample.labels[label] for label in metric.labels))
                seen.setdefault(key, []).append(sample.value)
    for (name, *_), values in seen.items():
        assert values == sorted(values) or not name.endswith("_total"), name
    last = {key: values[-1] for key, values in seen.items()}
    for name in ("wire_bytes", "payload_bytes", "collectives"):
        of_name = {key[1:]: value for key, value in last.items() if key[0] == f"laconic_{name}_total"}
        assert of_name == labelled(first["metrics"][STEPS], name)
    sent = sum(value for key, value in last.items() if key[0] == "laconic_wire_bytes_total")
    assert sent == first["sent"][STEPS]
    assert last[("laconic_loss",)] == pytest.approx(first["losses"][STEPS])
    assert {"laconic_wait_seconds_total", "laconic_residual_norm", "laconic_health_drift"} <= {key[0] for key in last}


def test_the_server_ends_with_the_session(run):
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


def test_opentelemetry_observes_instruments_in_its_style(run):
    from laconic.integrations.opentelemetry import opentelemetry_name

    _, (first, second) = run
    assert second["otel"] == []
    units = {opentelemetry_name(metric): metric.unit for metric in METRICS.values()}
    assert {name: unit for name, unit, _, _ in first["otel"]} == units
    sent = {(a["level"], a["phase"], a["op"]): v for name, _, a, v in first["otel"] if name == "laconic.wire"}
    assert sent == labelled(first["metrics"][STEPS], "wire_bytes")
    assert all(attributes["worker"] == 0 for _, _, attributes, _ in first["otel"])


def test_all_workers_write_where_they_are_asked_to(tmp_path):
    for found in run_workers(_quiet, 2, ("diloco(period=3)", str(tmp_path), True, True), timeout_s=150):
        assert "laconic_residual_norm" in found["texts"][-1] and found["otel"]
    assert sorted(p.name for p in (tmp_path / "tensorboard").iterdir()) == ["worker-0", "worker-1"]
    for worker in range(2):
        assert f'worker="{worker}"' in (tmp_path / f"laconic-{worker}.prom").read_text()
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2


def test_a_run_of_ones_own_keeps_its_steps(tmp_path, monkeypatch):
    import wandb

    from laconic.integrations.wandb import WandB

    for name, value in _ENVIRONMENT.items():
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
