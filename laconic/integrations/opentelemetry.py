"""Export a session's metrics through OpenTelemetry.

    from laconic.integrations.opentelemetry import OpenTelemetry

    session.observe(OpenTelemetry())             # with the process's MeterProvider, or OpenTelemetry(provider)

`wire_bytes` is `laconic.wire` in By, `wait_seconds` is `laconic.wait` in s, `residual_norm` is `laconic.residual.norm`.
OpenTelemetry's rules for Prometheus turn these into the names of `laconic.integrations.prometheus`. The reader of the
provider gets what the session measured last: it never touches the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter_provider

from laconic import Session, __version__
from laconic.integrations.listener import PREFIX, Listener
from laconic.session.metrics import METRICS, Metric

_UNIT_WORDS = {"By": "_bytes", "s": "_seconds"}


def opentelemetry_name(metric: Metric) -> str:
    """Return the name of an instrument: dotted, and without the unit, which is a field of its own.

    >>> opentelemetry_name(METRICS["wire_bytes"]), opentelemetry_name(METRICS["health_residual"])
    ('laconic.wire', 'laconic.health.residual')
    """
    return f"{PREFIX}.{metric.name.removesuffix(_UNIT_WORDS.get(metric.unit, '')).replace('_', '.')}"


class OpenTelemetry(Listener):
    """Makes an observable instrument for each metric. They show the last values also after the session has ended."""

    def __init__(self, provider: MeterProvider | None = None, *, every: int = 10, all_workers: bool = False) -> None:
        super().__init__(every, all_workers)
        self._provider = provider

    def open(self, session: Session) -> None:
        """Make the instruments."""
        meter = (self._provider or get_meter_provider()).get_meter(PREFIX, __version__)
        for metric in METRICS.values():
            make: Callable[..., object] = meter.create_observable_counter
            if metric.kind == "gauge":
                make = meter.create_observable_gauge
            make(
                opentelemetry_name(metric), [partial(self._observe, metric)], unit=metric.unit, description=metric.help
            )

    def _observe(self, metric: Metric, options: CallbackOptions) -> Iterator[Observation]:
        for each in list(self.latest.values()):
            if each.metric == metric:
                labels = dict(zip(metric.labels, each.labels, strict=True))
                yield Observation(each.value, {"worker": self.worker, **labels})
