"""Loggers, with the real packages: what they write is what the ledger says, and training does not notice them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from laconic.session.metrics import METRICS
from tests.integrations.loggers import BOARD, PLAN, STEPS, WRITTEN, offline_run, train_watched
from tests.session.models import assert_equal_bits
from tests.workers import run_workers

pytestmark = pytest.mark.frameworks
for package in ("tensorboard", "wandb", "mlflow", "prometheus_client", "opentelemetry.sdk"):
    pytest.importorskip(package)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """One run of two workers that all listeners have watched, on the first worker."""
    folder = tmp_path_factory.mktemp("loggers")
    return folder, run_workers(train_watched, 2, (PLAN, str(folder), True), timeout_s=150)


def labelled(metrics: dict[str, float], name: str) -> dict[tuple[str, ...], float]:
    return {tuple(key.split("/")[1:]): value for key, value in metrics.items() if key.split("/")[0] == name}


def test_training_and_traffic_are_the_same_without_listeners(run, tmp_path):
    _, watched = run
    alone = run_workers(train_watched, 2, (PLAN, str(tmp_path), False), timeout_s=60)
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
    for found in run_workers(train_watched, 2, ("diloco(period=3)", str(tmp_path), True, True), timeout_s=150):
        assert "laconic_residual_norm" in found["texts"][-1] and found["otel"]
    assert sorted(p.name for p in (tmp_path / "tensorboard").iterdir()) == ["worker-0", "worker-1"]
    for worker in range(2):
        assert f'worker="{worker}"' in (tmp_path / f"laconic-{worker}.prom").read_text()
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2


def test_the_dashboard_asks_for_what_is_exported(run):
    """Every name and label in its queries is in what the real run has exported."""
    _, (first, _) = run
    exported = set(re.findall(r"^(laconic_\w+)\{", first["texts"][-1], re.M))
    labels = {"job", *re.findall(r'(\w+)="', first["texts"][-1])}
    board = json.loads(BOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    assert len(queries) > 15
    used = {name for query in queries for name in re.findall(r"laconic_\w+", query)}
    assert used <= exported, used - exported
    assert exported - used <= set(), "the dashboard shows every metric"
    for query in queries:
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
        assert grouped | set(re.findall(r"(\w+)=~?\"", query)) <= labels, query
    legends = {
        label
        for panel in board["panels"]
        for t in panel["targets"]
        for label in re.findall(r"{{(\w+)}}", t["legendFormat"])
    }
    assert legends <= labels
