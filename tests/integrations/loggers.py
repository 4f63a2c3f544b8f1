"""A run that every logger watches, for tests; and a reader of W&B's offline runs, which has none."""

from __future__ import annotations

import json
import os
import struct
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.session.models import weights

ROOT = Path(__file__).parents[2]
BOARD = ROOT / "examples" / "observability" / "grafana.json"
PLAN = "power_sgd(rank=1, bits=4)"
STEPS, EVERY = 12, 4
WRITTEN = [1, 4, 8, 12]
"""The steps at which metrics are written."""


QUIET_WANDB = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "DO_NOT_TRACK": "1"}


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


def train_watched(worker: int, plan: str, folder: str, watched: bool, all_workers: bool = False) -> dict[str, Any]:
    """Train under a guard, with all listeners or with none; return the truth, and what can be read only here."""
    import wandb

    from laconic.integrations.listener import Listener

    warnings.simplefilter("default")  # those of the packages are not ours
    os.environ.update(QUIET_WANDB, WANDB_DIR=folder)
    made = listeners(Path(folder), all_workers) if watched else {}
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found: dict[str, Any] = {"losses": {}, "sent": {}, "metrics": {}, "texts": []}
    with laconic.attach(laconic.plan(plan), model, optimizer, observers=[laconic.Guard("warn", every=2)]) as session:
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
        wandb.teardown()  # only then has W&B's own process written everything
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
