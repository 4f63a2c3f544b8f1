"""Latency and bandwidth of a collective, from its seconds at several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laconic.planner.probe_data import Timing


@dataclass(frozen=True)
class Fit:
    """The best fit of seconds = hops * latency_s + 8 * traffic_bytes / bandwidth_bps; a rate may be infinite."""

    latency_s: float
    bandwidth_bps: float


def fit(timings: Sequence[Timing]) -> Fit:
    """Fit a latency a and a bandwidth B, neither negative: the least squares of (hops a + traffic / B - t) / t.

    t are medians, so that single slow samples do not count; relative errors let small messages count like large ones.

    >>> from laconic.planner.probe_data import Timing
    >>> half_ms = [Timing("all_gather", "world", 2, n, (5e-4 + 8 * n / 1e9,)) for n in (1000, 100_000)]
    >>> found = fit(half_ms)
    >>> round(found.latency_s, 9), round(found.bandwidth_bps)
    (0.0005, 1000000000)
    """
    x = [each.hops / each.seconds for each in timings]
    y = [8 * each.traffic_bytes / each.seconds for each in timings]
    xx, xy, yy = (sum(p * q for p, q in zip(*pair, strict=True)) for pair in ((x, x), (x, y), (y, y)))
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:
        latency = (sum(x) * yy - sum(y) * xy) / determinant
        per_bit = (sum(y) * xx - sum(x) * xy) / determinant
        if latency >= 0 and per_bit > 0:
            return Fit(latency, 1 / per_bit)
        if per_bit <= 0:
            return Fit(sum(x) / xx, inf)
    return Fit(0.0, yy / sum(y))
