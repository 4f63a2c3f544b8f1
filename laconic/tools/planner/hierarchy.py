"""A hierarchy proposed from measured links: which hosts are fast among themselves, and how often groups synchronise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, sqrt
from statistics import median

from laconic.tools.planner.probe_data import LinkTiming, Probe
from laconic.tools.units import listed, rate_text

MUCH_FASTER = 2.0
"""Links inside groups are at least so many times faster than those between them."""
SHARE = 0.1
"""Of the time that synchronising weights between groups may take."""
MOST_STEPS = 512

Pair = tuple[int, int]


@dataclass(frozen=True)
class Hierarchy:
    """Hosts in groups; all in one group if no links are much faster than others.

    `group_workers` is the size to use in a plan: None if groups differ in size, or their workers are not consecutive.
    `period` is the number of steps after which averaging all weights between groups takes a tenth of the time.
    """

    groups: tuple[tuple[int, ...], ...]
    inner_bps: float | None
    outer_bps: float | None
    group_workers: int | None
    period: int | None

    @property
    def words(self) -> str:
        """The proposal in words."""
        if len(self.groups) == 1 or self.outer_bps is None:
            return "no groups: no links between hosts are much faster than others"
        groups = listed([f"hosts {listed([str(host) for host in group])}" for group in self.groups])
        inside = "" if self.inner_bps is None else f" ({short_rate(self.inner_bps)} inside)"
        text = f"groups of {groups}{inside}, connected by {short_rate(self.outer_bps)}"
        if self.group_workers is None:
            return (
                f"{text}. Plans need groups of equal size and of consecutive workers: start the workers in that order"
            )
        period = "" if self.period is None else f", period={self.period}"
        return f"{text}: group={self.group_workers}{period}"


def propose(probe: Probe) -> Hierarchy | None:
    """Propose groups from the links of a probe; None for one host."""
    if len(probe.hosts) < 2 or not probe.links:
        return None
    groups = clusters(len(probe.hosts), pair_rates(probe.links))
    if len(groups) == 1 and max(map(len, probe.hosts)) > 1:  # flat between hosts: a machine is a group
        groups = [[host] for host in range(len(probe.hosts))]
    rates = pair_rates(probe.links)
    site = {host: index for index, group in enumerate(groups) for host in group}
    inner = [rate for (a, b), rate in rates.items() if site[a] == site[b]]
    outer = [rate for (a, b), rate in rates.items() if site[a] != site[b]]
    outer_bps = median(outer) if outer else None
    return Hierarchy(
        tuple(map(tuple, groups)),
        median(inner) if inner else None,
        outer_bps,
        group_size([[worker for host in group for worker in probe.hosts[host]] for group in groups]),
        _period(probe, len(groups), outer_bps),
    )


def pair_rates(links: Sequence[LinkTiming]) -> dict[Pair, float]:
    """Return the rate of each pair of hosts: that of its slower direction."""
    rates: dict[Pair, float] = {}
    for each in links:
        pair = min(each.sender, each.receiver), max(each.sender, each.receiver)
        rates[pair] = min(rates.get(pair, each.bandwidth_bps), each.bandwidth_bps)
    return rates


def clusters(hosts: int, rates: Mapping[Pair, float]) -> list[list[int]]:
    """Cut the hosts at the largest gap in log bandwidth: faster links join hosts. One cluster if no gap is large.

    >>> clusters(4, {(0, 1): 2e8, (2, 3): 2e8, (0, 2): 1e7, (0, 3): 1e7, (1, 2): 1e7, (1, 3): 1e7})
    [[0, 1], [2, 3]]
    """
    ordered = sorted(rates.values())
    gaps = [(high / low, sqrt(high * low)) for low, high in pairwise(ordered)]
    gap, threshold = max(gaps, default=(1.0, 0.0))
    if gap < MUCH_FASTER:
        return [list(range(hosts))]
    site = list(range(hosts))
    for (a, b), rate in rates.items():
        if rate > threshold:
            site = [site[a] if each == site[b] else each for each in site]
    return [[host for host in range(hosts) if site[host] == each] for each in dict.fromkeys(site)]


def group_size(groups: Sequence[Sequence[int]]) -> int | None:
    """Return the size of groups of consecutive workers; None if there is only one, or they are not so.

    >>> group_size([[0, 1], [2, 3]]), group_size([[0, 2], [1, 3]]), group_size([[0], [1, 2]])
    (2, None, None)
    """
    size = len(groups[0])
    in_order = [worker for group in groups for worker in group] == list(range(size * len(groups)))
    return size if len(groups) > 1 and size > 1 and in_order and {len(group) for group in groups} == {size} else None


def short_rate(rate_bps: float) -> str:
    """Format a rate in three digits.

    >>> short_rate(9_612_345.0)
    '9.61mbit'
    """
    return rate_text(float(f"{rate_bps:.3g}"))


def _period(probe: Probe, groups: int, outer_bps: float | None) -> int | None:
    if outer_bps is None or probe.step is None:
        return None
    sync_s = 2 * (groups - 1) / groups * 32 * probe.model.parameters / outer_bps
    return min(MOST_STEPS, max(1, ceil(sync_s * (1 - SHARE) / SHARE / probe.step.seconds)))
