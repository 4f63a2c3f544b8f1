"""Show a session's metrics to Prometheus: over HTTP, or in a file for node_exporter.

    from laconic.integrations.prometheus import PrometheusServer, PrometheusTextfile

    session.observe(PrometheusServer(port=9464))                                    # http://127.0.0.1:9464/metrics
    session.observe(PrometheusTextfile("/var/lib/node_exporter/laconic.prom"))

Names are those of docs/metrics.md after `laconic_`, with `_total` after counters. Every metric has the label `worker`.
A scrape gets what the session measured last: it never touches the training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from laconic import Session
from laconic.integrations.listener import PREFIX, Listener
from laconic.session.metrics import METRICS, Metric, Sample
from laconic.values import is_whole


def prometheus_name(metric: Metric) -> str:
    """Return the name under which Prometheus knows a metric.

    >>> prometheus_name(METRICS["wire_bytes"]), prometheus_name(METRICS["residual_norm"])
    ('laconic_wire_bytes_total', 'laconic_residual_norm')
    """
    return f"{PREFIX}_{metric.name}" + ("_total" if metric.kind == "counter" else "")


class SessionCollector:
    """Collects what a listener has measured last."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield a family for each metric that has samples."""
        latest, worker = self._listener.latest.values(), str(self._listener.worker)
        for metric in METRICS.values():
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            made = family(f"{PREFIX}_{metric.name}", metric.help, labels=("worker", *metric.labels))
            for each in latest:
                if each.metric == metric:
                    made.add_metric((worker, *each.labels), each.value)
            if made.samples:
                yield made


class PrometheusServer(Listener):
    """Serves /metrics over HTTP; by default this machine alone can read it.

    With `all_workers`, each worker of a machine has a port of its own: `port` plus the LOCAL_RANK of torchrun.
    """

    def __init__(
        self, port: int = 9464, host: str = "127.0.0.1", *, every: int = 10, all_workers: bool = False
    ) -> None:
        super().__init__(every, all_workers)
        if not is_whole(port, least=0) or port > 65535:
            raise ValueError(f"PrometheusServer(port={port!r}): a port is between 0 and 65535; 0 is any free port.")
        self.host, self.port = host, port

    def open(self, session: Session) -> None:
        """Start the server. `port` is then the one that it has."""
        if self.all_workers and self.port:
            self.port += int(os.environ.get("LOCAL_RANK", self.worker))
        registry = CollectorRegistry()
        registry.register(SessionCollector(self))
        try:
            self._server, self._thread = start_http_server(self.port, self.host, registry)
        except OSError as error:
            raise OSError(
                f"PrometheusServer(port={self.port}, host={self.host!r}): {error.strerror}. Choose a port that is free "
                "on this machine, or 0 for any."
            ) from error
        self.port = self._server.server_port

    def close(self) -> None:
        """End the server and its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class PrometheusTextfile(Listener):
    """Writes a file for node_exporter's textfile collector, whole or not at all; with `all_workers`, one for each."""

    def __init__(self, path: str | Path, *, every: int = 10, all_workers: bool = False) -> None:
        super().__init__(every, all_workers)
        self._path = Path(path)
        if self._path.suffix != ".prom":
            raise ValueError(f"PrometheusTextfile({str(path)!r}): node_exporter reads files whose name ends in .prom.")

    def open(self, session: Session) -> None:
        """Make the registry."""
        self._registry = CollectorRegistry()
        self._registry.register(SessionCollector(self))
        if self.all_workers:
            self._path = self._path.with_stem(f"{self._path.stem}-{self.worker}")

    def write(self, step: int, some: Sequence[Sample]) -> None:
        """Write all metrics."""
        write_to_textfile(str(self._path), self._registry)
