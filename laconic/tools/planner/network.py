"""How long a collective takes, by a formula over links of known rates or as a probe has measured it; and a step.

p workers, S bytes passed by each, B bytes/s of one worker's link, a seconds of latency for each message. gloo sends
around a ring, and so does NCCL with large messages:

    all_reduce   2(p−1) (a + S/p/B)     reduce-scatter, then all-gather (Patarasuk and Yuan 2009)
    all_to_all    (p−1) (a + S/p/B)
    all_gather    (p−1) (a + S/B)

Where links have levels, workers behind one link share it. A ring crosses it once; in an all_to_all among p workers, n
behind one link send n (p−n)/p S over it.

A step computes for `compute_s` seconds: the forward pass, then the backward pass, from the last layer down. Messages
are released at their offset from the start of a step, into a queue that sends one after another. A step ends when its
computation has, and all messages that are due at its end have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from math import inf, log, sqrt
from operator import mul
from typing import TypeAlias

from laconic.ledger import crossing_bytes
from laconic.tools.launch.links import Level, Link, link
from laconic.tools.planner.probe_data import Timing
from laconic.tools.units import DURATION, parse

BACKWARD_SHARE = 2 / 3
"""The share of a step that the backward pass takes: it computes two products where the forward pass computes one."""
ITERATIONS = 100
SMALL = 0.02
"""Relative errors of a fit below it count by their square."""


@dataclass(frozen=True)
class ComputedNetwork:
    """Links of known rates, and the latency of a message."""

    link: Link
    latency_s: float = 0.0

    @property
    def rate_bps(self) -> float:
        """The rate of the slowest link."""
        return self.link.slowest_bps

    @property
    def sharing(self) -> int:
        """How many neighbouring workers share one of the slowest links."""
        return self.link.sharing

    def faster(self, factor: float) -> ComputedNetwork:
        """Return the same network with links that are `factor` times as fast."""
        levels = tuple(Level(each.count, each.rate_bps * factor) for each in self.link.levels)
        return replace(self, link=Link(levels))

    def seconds(self, op: str, payload_bytes: float, workers: int) -> float:
        """Return the seconds of a collective among `workers` neighbours."""
        if workers < 2 or payload_bytes <= 0:
            return 0.0
        return collective_s(op, payload_bytes, workers, self.link.inside(workers), self.latency_s)


def computed_network(text: str, latency: str | None, workers: int | None) -> ComputedNetwork:
    """Return the network that --link and --latency describe."""
    return ComputedNetwork(link(text, workers), 0.0 if latency is None else parse(latency, DURATION, "--latency"))


def collective_s(op: str, payload_bytes: float, workers: int, link: Link, latency_s: float = 0.0) -> float:
    """Return the seconds of a collective in a ring.

    The ring follows the order of the workers, so each link carries the traffic of one worker. The slowest level
    decides.

    >>> from laconic.tools.launch.links import link
    >>> round(collective_s("all_reduce", 1_000_000, workers=4, link=link("100mbit", workers=4)), 3)
    0.12
    """
    if workers < 2:
        return 0.0
    hops = 2 * (workers - 1) if op == "all_reduce" else workers - 1
    if op == "all_to_all" and len(link.levels) > 1:
        units = accumulate((level.count for level in link.levels[:-1]), mul, initial=1)
        crossed = [(level, unit) for level, unit in zip(link.levels, units, strict=True) if level.count > 1]
        sending_s = max(
            8 * crossing_bytes(op, payload_bytes, workers, unit) / level.rate_bps for level, unit in crossed
        )
        return hops * latency_s + sending_s
    piece = payload_bytes / workers if op in ("all_reduce", "all_to_all") else payload_bytes
    return hops * (latency_s + piece * 8 / link.slowest_bps)


class MeasuredNetwork:
    """A network whose collectives a probe has measured; between two sizes it interpolates.

    With `times`, links are so many times as fast: then the seconds that the fitted latency does not explain are so many
    times as short.
    """

    def __init__(self, timings: Sequence[Timing], workers: int, times: float = 1.0) -> None:
        self.timings, self.workers, self.times = tuple(timings), workers, times

    @property
    def rate_bps(self) -> float:
        """The bandwidth of an all_reduce among all workers."""
        return fit(self._of("all_reduce", self.workers)).bandwidth_bps * self.times

    @property
    def sharing(self) -> int:
        """How many neighbouring workers share one of the slowest links: those of the largest group that was probed."""
        return max((each.workers for each in self.timings if each.workers < self.workers), default=1)

    def faster(self, factor: float) -> MeasuredNetwork:
        """Return the same network with links that are `factor` times as fast."""
        return MeasuredNetwork(self.timings, self.workers, self.times * factor)

    def seconds(self, op: str, payload_bytes: float, workers: int) -> float:
        """Return the seconds of a collective in the level whose groups have so many workers."""
        if workers < 2 or payload_bytes <= 0:
            return 0.0
        found = self._of(op, workers)
        total = interpolated(found, payload_bytes)
        latency = min(total, found[0].hops * fit(found).latency_s)
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


Network: TypeAlias = ComputedNetwork | MeasuredNetwork
"""Knows how long collectives take."""


@dataclass(frozen=True)
class Fit:
    """The best fit of seconds = hops * latency_s + 8 * traffic_bytes / bandwidth_bps; a rate may be infinite."""

    latency_s: float
    bandwidth_bps: float

    def seconds(self, hops: int, traffic_bytes: float) -> float:
        """Return the seconds of a collective of so many hops, in which a worker sends so many bytes."""
        return hops * self.latency_s + 8 * traffic_bytes / self.bandwidth_bps


@cache
def fit(timings: tuple[Timing, ...]) -> Fit:
    """Fit a latency and a bandwidth, neither negative: the least sum of |log(fitted / measured)|.

    Medians are fitted, so that single slow samples do not count. Absolute values keep a size that does not fit, as
    where a token bucket lets a burst pass, from counting much. Logarithms let small messages count like large ones, and
    half of the measured time like twice of it. (Gauss-Newton, reweighted, from the least squares of relative errors.)

    >>> half_ms = tuple(Timing("all_gather", "world", 2, n, (5e-4 + 8 * n / 1e9,)) for n in (1000, 100_000))
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
    if determinant > 1e-12 * xx * yy:  # the normal equations have one solution
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


# Steps, in which communication overlaps with computation.


@dataclass(frozen=True)
class Message:
    """What is sent of one step: when it is released, how long it takes, and how many steps later it is due."""

    release_s: float
    seconds: float
    delay: int = 0


@dataclass(frozen=True)
class Timeline:
    """The seconds of one cycle of steps."""

    total_s: float
    compute_s: float
    steps: int

    @property
    def step_s(self) -> float:
        """The mean seconds of a step."""
        return self.total_s / self.steps

    @property
    def exposed_s(self) -> float:
        """The mean seconds of a step in which nothing is computed."""
        return max(0.0, self.step_s - self.compute_s)

    @property
    def utilisation(self) -> float:
        """The share of the time in which workers compute."""
        return self.compute_s / self.step_s if self.step_s else 1.0


def timeline(cycle: Sequence[Sequence[Message]], compute_s: float) -> Timeline:
    """Return the time of a cycle of steps that repeats, each given by its messages, once it has settled.

    >>> timeline([[Message(release_s=1.0, seconds=0.5)]], compute_s=1.0).step_s
    1.5
    >>> timeline([[], [Message(release_s=1.0, seconds=0.5, delay=1)]], compute_s=1.0).exposed_s
    0.0
    """
    now = free = began = 0.0
    steps, number = len(cycle), 0
    delay = max((message.delay for messages in cycle for message in messages), default=0)
    settled = (2 + 2 * delay // steps) * steps  # from here on, every cycle takes as long
    busy = [index for index, messages in enumerate(cycle) if messages] or [steps]
    due: list[tuple[int, float]] = []  # the step at whose end a message must have arrived, and when it does
    while number < settled + steps:
        if number == settled:
            began = now
        if not due and not cycle[number % steps]:  # only computation until the next message, or the cycle's end
            quiet = next((index for index in busy if index > number % steps), steps) - number % steps
            now, number = now + quiet * compute_s, number + quiet
            continue
        for message in cycle[number % steps]:
            free = max(free, now + message.release_s) + message.seconds
            due.append((number + message.delay, free))
        now = max([now + compute_s, *(at for step, at in due if step <= number)])
        due = [(step, at) for step, at in due if step > number]
        number += 1
    return Timeline(now - began, compute_s, steps)


def released_s(done: float, compute_s: float) -> float:
    """Return when a gradient is ready, after the share `done` of the backward pass, from the start of the step."""
    return compute_s * (1 - BACKWARD_SHARE + BACKWARD_SHARE * done)
