"""A network whose collectives were measured by a probe."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from laconic.tools.planner.fit import Fit, fit, interpolated
from laconic.tools.planner.probe_data import Timing


class MeasuredNetwork:
    """Tells the seconds of collectives as they were measured, between two sizes by interpolation.

    With `times`, links are so many times as fast: then the part of the time that the fitted latency does not explain
    is so many times as short.
    """

    def __init__(self, timings: Sequence[Timing], workers: int, times: float = 1.0) -> None:
        self.timings, self.workers, self.times = tuple(timings), workers, times

    @property
    def rate_bps(self) -> float:
        """The bandwidth of an all_reduce among all workers."""
        return _fit(self._of("all_reduce", self.workers)).bandwidth_bps * self.times

    def faster(self, factor: float) -> MeasuredNetwork:
        """Return the same network with links that are `factor` times as fast."""
        return MeasuredNetwork(self.timings, self.workers, self.times * factor)

    def seconds(self, op: str, payload_bytes: float, workers: int) -> float:
        """Return the seconds of a collective among so many workers: of the level that has as many."""
        if workers < 2 or payload_bytes <= 0:
            return 0.0
        found = self._of(op, workers)
        total = interpolated(found, payload_bytes)
        latency = min(total, found[0].hops * _fit(found).latency_s)
        return latency + (total - latency) / self.times

    def _of(self, op: str, workers: int) -> tuple[Timing, ...]:
        op = "all_gather" if op == "broadcast" else op
        found = tuple(each for each in self.timings if each.op == op and each.workers == workers)
        if not found:
            measured = sorted({each.workers for each in self.timings})
            raise ValueError(
                f"the probe has no {op} among {workers} workers, only among {measured}. Run laconic probe with as many "
                f"workers, or with --groups {workers}."
            )
        return found


@cache
def _fit(timings: tuple[Timing, ...]) -> Fit:
    return fit(timings)
