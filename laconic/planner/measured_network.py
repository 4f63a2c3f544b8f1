"""A network whose collectives were measured by a probe."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log

from laconic.planner.fit import Fit, fit
from laconic.planner.probe_data import Probe, Timing


@dataclass(frozen=True)
class MeasuredNetwork:
    """Tells the seconds of collectives as they were measured, between two sizes by interpolation.

    Beyond the largest size that was measured, the fitted bandwidth goes on. With `times`, links are so many times as
    fast: then the part of the time that the fitted latency does not explain is so many times as short.
    """

    probe: Probe
    times: float = 1.0

    @property
    def rate_bps(self) -> float:
        """The bandwidth of an all_reduce among all workers."""
        return self._fit("all_reduce", self.probe.workers).bandwidth_bps * self.times

    def faster(self, factor: float) -> MeasuredNetwork:
        """Return the same network with links that are `factor` times as fast."""
        return replace(self, times=self.times * factor)

    def seconds(self, op: str, payload_bytes: float, workers: int) -> float:
        """Return the seconds of a collective among so many workers: of the level that has as many."""
        if workers < 2 or payload_bytes <= 0:
            return 0.0
        found = self._timings(op, workers)
        total = interpolated(found, payload_bytes, fit(found).bandwidth_bps)
        if self.times == 1.0:
            return total
        latency = min(total, found[0].hops * fit(found).latency_s)
        return latency + (total - latency) / self.times

    def _timings(self, op: str, workers: int) -> list[Timing]:
        op = "all_gather" if op == "broadcast" else op
        found = [each for each in self.probe.timings if each.op == op and each.workers == workers]
        if not found:
            measured = sorted({each.workers for each in self.probe.timings})
            raise ValueError(
                f"the probe has no {op} among {workers} workers, only among {measured}. Run laconic probe with as many "
                f"workers, or with --groups {workers}."
            )
        return sorted(found, key=lambda each: each.bytes)

    def _fit(self, op: str, workers: int) -> Fit:
        return fit(self._timings(op, workers))


def interpolated(timings: Sequence[Timing], payload_bytes: float, beyond_bps: float) -> float:
    """Return the seconds of a payload, on a straight line between two measured sizes, both in logarithms.

    >>> two = [Timing("all_gather", "world", 2, size, (seconds,)) for size, seconds in ((1000, 1.0), (4000, 2.0))]
    >>> [round(interpolated(two, size, beyond_bps=8000.0), 3) for size in (10, 2000, 6000)]
    [1.0, 1.414, 4.0]
    """
    first, last = timings[0], timings[-1]
    if payload_bytes <= first.bytes:
        return first.seconds
    if payload_bytes >= last.bytes:
        per_byte = last.traffic_bytes / last.bytes
        more = 0.0 if beyond_bps == inf else 8 * per_byte * (payload_bytes - last.bytes) / beyond_bps
        return last.seconds + more
    index = bisect([each.bytes for each in timings], payload_bytes)
    low, high = timings[index - 1], timings[index]
    share = log(payload_bytes / low.bytes) / log(high.bytes / low.bytes)
    return exp((1 - share) * log(low.seconds) + share * log(high.seconds))
