"""The seconds of a collective, one formula each.

p workers, S bits passed by one worker, B bit/s of one worker's link, a seconds of latency for each message:

    ring              2(p-1) (a + S/p/B)                     all_gather: p-1 messages of S, all_to_all: p-1 of S/p
    halving-doubling  2 log2(p) a + 2(p-1)/p S/B
    tree              2 log2(p) a + 2 S/B                    pipelined
    hierarchical      (k-1)/k S/B0 twice, and between them 2(g-1)/g (S/k)/B1: g groups of k workers

A ring is what gloo uses, and NCCL for large messages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Literal, Protocol, TypeAlias, get_args

from laconic.tools.launch.links import Level, Link, collective_s

Algorithm: TypeAlias = Literal["ring", "halving-doubling", "tree", "hierarchical"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


class NetworkTimes(Protocol):
    """Tells the seconds of collectives."""

    def seconds(self, op: str, payload_bytes: float, workers: int) -> float:
        """Return the seconds of a collective to which each of `workers` neighbours passes `payload_bytes`."""
        ...

    def faster(self, factor: float) -> NetworkTimes:
        """Return the same network with links that are `factor` times as fast."""
        ...

    @property
    def rate_bps(self) -> float:
        """The rate of the slowest link."""
        ...


@dataclass(frozen=True)
class Formula:
    """A network of links of known rates."""

    link: Link
    latency_s: float = 0.0
    algorithm: Algorithm = "ring"

    @property
    def rate_bps(self) -> float:
        """The rate of the slowest link."""
        return self.link.slowest_bps

    def faster(self, factor: float) -> Formula:
        """Return the same network with links that are `factor` times as fast."""
        levels = tuple(Level(each.count, each.rate_bps * factor) for each in self.link.levels)
        return replace(self, link=Link(levels))

    def seconds(self, op: str, payload_bytes: float, workers: int) -> float:
        """Return the seconds of a collective among `workers` neighbours."""
        link = self.link.inside(workers)
        if workers < 2 or payload_bytes <= 0:
            return 0.0
        if op != "all_reduce" or self.algorithm == "ring":
            return collective_s(op, payload_bytes, workers, link, self.latency_s)
        bits, hops = 8 * payload_bytes, ceil(log2(workers))
        if self.algorithm == "tree":
            return 2 * hops * self.latency_s + 2 * bits / link.slowest_bps
        if self.algorithm == "halving-doubling":
            return 2 * hops * self.latency_s + 2 * (workers - 1) / workers * bits / link.slowest_bps
        return hierarchical_s(bits, link, self.latency_s)


def hierarchical_s(bits: float, link: Link, latency_s: float = 0.0) -> float:
    """Return the seconds of an all_reduce that scatters inside each level, goes on outside, and gathers back.

    >>> round(hierarchical_s(8e9, Link((Level(8, 8e11), Level(4, 1e9))), 0.0), 4)
    1.5175
    """
    inner, outer = link.levels[:-1], link.levels[-1]
    total, share = 0.0, bits
    for level in inner:
        total += 2 * ((level.count - 1) * latency_s + (level.count - 1) / level.count * share / level.rate_bps)
        share /= level.count
    hops = 2 * (outer.count - 1)
    return total + hops * (latency_s + share / outer.count / outer.rate_bps)
