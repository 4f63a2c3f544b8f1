"""Write a session's metrics to MLflow.

    from laconic.integrations.mlflow import MLflow

    session.observe(MLflow("my-experiment", tracking_uri="http://tracking:5000", every=10))

`laconic/loss_against_bytes` has the bytes that this worker has sent where MLflow has its step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from laconic import Session
from laconic.integrations.listener import PREFIX, Listener
from laconic.session.metrics import Sample


class MLflow(Listener):
    """Logs to a new run of an experiment, which ends with the session, or to a run of yours, by its `run_id`.

    The tracking server is MLflow's default (MLFLOW_TRACKING_URI) or `tracking_uri`. A thread of MLflow's sends the
    metrics: training does not wait for the server.
    """

    def __init__(
        self,
        experiment: str = "laconic",
        *,
        run_id: str | None = None,
        tracking_uri: str | None = None,
        every: int = 10,
        all_workers: bool = False,
    ) -> None:
        super().__init__(every, all_workers)
        if run_id is not None and all_workers:
            raise ValueError(
                f"MLflow(run_id={run_id!r}, all_workers=True): curves of several workers would mix in one run. Leave "
                "out run_id for a run of each worker."
            )
        self._experiment, self._given, self._uri = experiment, run_id, tracking_uri
        self._sent: Any = None
        """The last batch on its way to the server."""

    def open(self, session: Session) -> None:
        """Start the run, if it is ours, and log the plan."""
        self._client = MlflowClient(self._uri)
        self._run_id = self._given or self._new_run()
        plan = [Param(f"{PREFIX}_plan", repr(session.plan)), Param(f"{PREFIX}_workers", str(session.workers))]
        self._client.log_batch(self._run_id, params=plan)

    def _new_run(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        run = self._client.create_run(experiment, run_name=f"worker-{self.worker}" if self.all_workers else None)
        return str(run.info.run_id)

    def write(self, step: int, some: Sequence[Sample]) -> None:
        """Log a batch."""
        now_ms = time.time_ns() // 1_000_000
        batch = [Metric(f"{PREFIX}/{each.key}", each.value, now_ms, step) for each in some]
        self._sent = self._client.log_batch(self._run_id, batch, synchronous=False)

    def write_against_bytes(self, sent_bytes: int, loss: Sample) -> None:
        """Log the loss with the bytes as its step."""
        row = Metric(f"{PREFIX}/{loss.key}_against_bytes", loss.value, time.time_ns() // 1_000_000, sent_bytes)
        self._sent = self._client.log_batch(self._run_id, [row], synchronous=False)

    def close(self) -> None:
        """Wait until everything is sent, and end the run, if it is ours."""
        if self._sent is not None:
            self._sent.wait()
        if self._given is None:
            self._client.set_terminated(self._run_id)
