"""Latency and bandwidth of a collective, from its seconds at several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laconic.tools.planner.probe_data import Timing

ITERATIONS = 100
SMALL = 0.02
"""Relative errors below it count by their square."""


@dataclass(frozen=True)
class Fit:
    """The best fit of seconds = hops * latency_s + 8 * traffic_bytes / bandwidth_bps; a rate may be infinite."""

    latency_s: float
    bandwidth_bps: float

    def seconds(self, hops: int, traffic_bytes: float) -> float:
        """Return the seconds of a collective of so many hops, in which a worker sends so many bytes."""
        return hops * self.latency_s + 8 * traffic_bytes / self.bandwidth_bps


def fit(timings: Sequence[Timing]) -> Fit:
    """Fit a latency and a bandwidth, neither negative: the least sum of |log(fitted / measured)|.

    Medians are fitted, so that single slow samples do not count. Absolute values let a size that does not fit, as where
    a token bucket lets a burst pass, not count much either. Logarithms let small messages count like large ones, and
    half of the measured time like twice of it. (Gauss-Newton, reweighted, from the least squares of relative errors.)

    >>> from laconic.tools.planner.probe_data import Timing
    >>> half_ms = [Timing("all_gather", "world", 2, n, (5e-4 + 8 * n / 1e9,)) for n in (1000, 100_000)]
    >>> found = fit(half_ms)
    >>> round(found.latency_s, 9), round(found.bandwidth_bps)
    (0.0005, 1000000000)
    """
    measured = [each.seconds for each in timings]
    found = _least_squares(timings, measured, measured)
    for _ in range(ITERATIONS):
        fitted = [found.seconds(each.hops, each.traffic_bytes) for each in timings]
        errors = [log(f / t) for f, t in zip(fitted, measured, strict=True)]
        wanted = [f * (1 - error) for f, error in zip(fitted, errors, strict=True)]
        unit = [f * sqrt(max(abs(error), SMALL)) for f, error in zip(fitted, errors, strict=True)]
        found = _least_squares(timings, wanted, unit)
    return found


def _least_squares(timings: Sequence[Timing], wanted: Sequence[float], unit: Sequence[float]) -> Fit:
    """Minimise the squares of (fitted - wanted) / unit, without negative results."""
    x = [each.hops / u for each, u in zip(timings, unit, strict=True)]
    y = [8 * each.traffic_bytes / u for each, u in zip(timings, unit, strict=True)]
    z = [w / u for w, u in zip(wanted, unit, strict=True)]
    xx, xy, yy, xz, yz = (_dot(*pair) for pair in ((x, x), (x, y), (y, y), (x, z), (y, z)))
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:
        latency, per_bit = (xz * yy - yz * xy) / determinant, (yz * xx - xz * xy) / determinant
        if latency >= 0 and per_bit > 0:
            return Fit(latency, 1 / per_bit)
        if per_bit <= 0:
            return Fit(max(xz, 0.0) / xx, inf)
    return Fit(0.0, yy / yz if yz > 0 else inf)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(p * q for p, q in zip(a, b, strict=True))


def interpolated(timings: Sequence[Timing], payload_bytes: float) -> float:
    """Return the seconds of a collective of any size, from those measured: straight lines between their medians.

    Below the smallest size it is the smallest's time; above the largest, the last line goes on.

    >>> from laconic.tools.planner.probe_data import Timing
    >>> measured = [Timing("all_gather", "world", 2, n, (s,)) for n, s in ((1000, 0.1), (2000, 0.2), (4000, 0.3))]
    >>> [round(interpolated(measured, n), 9) for n in (10, 1500, 3000, 6000)]
    [0.1, 0.15, 0.25, 0.4]
    """
    ordered = sorted(timings, key=lambda each: each.bytes)
    if payload_bytes <= ordered[0].bytes or len(ordered) == 1:
        return ordered[0].seconds
    pairs = list(pairwise(ordered))
    low, high = next((pair for pair in pairs if payload_bytes <= pair[1].bytes), pairs[-1])
    slope = max(0.0, high.seconds - low.seconds) / (high.bytes - low.bytes)
    return low.seconds + slope * (payload_bytes - low.bytes)
