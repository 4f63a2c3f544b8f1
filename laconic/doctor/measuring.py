"""Clocks and links between workers, measured with a few messages over gloo.

A clock is read as NTP does: worker 0 asks, the other answers with its time, and of several asks the quickest counts:
the answer was then written within half of its round trip. Links are measured pair by pair, in rounds in which each
worker has one partner (a tournament), and with sizes that fit the time that there is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from laconic.checks.outliers import names
from laconic.doctor.finding import Finding, ok, warning

ASKS = 3
CLOCKS_S = 3.0
LINKS_S = 3.0
MOST_ROUNDS = 7  # of a tournament; all pairs of up to 8 workers, a sample of more
FIRST_BYTES = 16_384
MOST_BYTES = 16 * 2**20
SKEW_S = 0.1
MUCH_SLOWER = 4.0


@dataclass(frozen=True)
class Link:
    """What was measured between two workers."""

    first: int
    second: int
    round_trip_s: float
    bits_per_s: float

    def __str__(self) -> str:
        return f"{self.first}-{self.second} {rate(self.bits_per_s)}, {self.round_trip_s * 1e3:.1f} ms"


def measure_clocks(worker: int, workers: int, budget_s: float = CLOCKS_S) -> list[float | None]:
    """On worker 0, by how much each worker's clock is surely ahead of its own; None: there was no time to ask."""
    message = torch.zeros(1, dtype=torch.float64)
    if worker:
        while True:
            dist.recv(message, src=0)
            if not message.item():
                return []
            dist.send(torch.tensor([time.time()], dtype=torch.float64), dst=0)
    offsets: list[float | None] = [0.0]
    until = time.monotonic() + budget_s
    for other in range(1, workers):
        asked = [_ask_time(other) for _ in range(ASKS) if time.monotonic() < until]
        dist.send(torch.zeros(1, dtype=torch.float64), dst=other)
        offsets.append(min(asked)[1] if asked else None)
    return offsets


def _ask_time(other: int) -> tuple[float, float]:
    """The round trip, and the least difference of the clocks that it leaves possible."""
    answer = torch.zeros(1, dtype=torch.float64)
    before = time.time()
    dist.send(torch.ones(1, dtype=torch.float64), dst=other)
    dist.recv(answer, src=other)
    after = time.time()
    between = answer.item() - (before + after) / 2
    return after - before, math.copysign(max(0.0, abs(between) - (after - before) / 2), between)


def check_clocks(offsets: Sequence[float | None]) -> Finding:
    """Whether clocks are close enough for logs to be compared, and for certificates and leases to hold."""
    known = {worker: offset for worker, offset in enumerate(offsets) if offset is not None}
    far = [worker for worker, offset in known.items() if abs(offset) > SKEW_S]
    note = "" if len(known) == len(offsets) else f" ({len(offsets) - len(known)} not measured: there was no time)"
    if far:
        worst = max(far, key=lambda worker: abs(known[worker]))
        return warning(
            "clocks",
            f"{names(far)} off worker 0's clock, worker {worst} by {known[worst]:+.3g} s{note}",
            "Run chrony or systemd-timesyncd on every host. Logs cannot be compared until then.",
        )
    return ok(
        "clocks", f"within {max(map(abs, known.values())) * 1e3:.0f} ms beyond what the network's delay explains{note}"
    )


def tournament(workers: int) -> list[list[tuple[int, int]]]:
    """WeightSync of pairs in which everybody meets everybody, each in at most one pair a round.

    >>> tournament(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    ring = list(range(workers + workers % 2))
    rounds = []
    for _ in range(len(ring) - 1):
        pairs = [(ring[i], ring[-1 - i]) for i in range(len(ring) // 2)]
        rounds.append(sorted((min(p), max(p)) for p in pairs if max(p) < workers))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def sampled(workers: int) -> list[list[tuple[int, int]]]:
    """As many rounds as there is time for, evenly taken."""
    rounds = tournament(workers)
    return rounds[:: -(-len(rounds) // MOST_ROUNDS)] if rounds else []


def measure_links(worker: int, workers: int, budget_s: float) -> list[Link]:
    """The links between this worker and those of a higher number that it was paired with."""
    rounds = sampled(workers)
    found = []
    for pairs in rounds:
        dist.barrier()  # a pair that is measured while another still is would share its link
        for first, second in pairs:
            if worker == first:
                found.append(_measure(first, second, budget_s / len(rounds)))
            elif worker == second:
                _echo(first)
    return found


def _measure(first: int, second: int, budget_s: float) -> Link:
    until = time.monotonic() + budget_s
    trip = min(_there_and_back(second, 8) for _ in range(ASKS))
    size = FIRST_BYTES
    took = _there_and_back(second, size)
    while (larger := _that_fits(size, took, until - time.monotonic())) > size:
        size = larger
        took = _there_and_back(second, size)
    if time.monotonic() + took < until:  # what a shaper lets through in a burst is spent by now
        took = _there_and_back(second, size)
    dist.send(torch.zeros(1, dtype=torch.int64), dst=second)
    return Link(first, second, trip, 16 * size / max(took - trip, took / 10, 1e-9))


def _that_fits(size: int, took: float, left_s: float) -> int:
    """The next size to try: one that takes a third of the time that is left, if it is at least twice this one."""
    larger = min(MOST_BYTES, int(size * min(16.0, max(0.0, left_s) / 3 / max(took, 1e-9))))
    return larger if larger >= 2 * size else size


def _there_and_back(other: int, size: int) -> float:
    load = torch.zeros(size, dtype=torch.uint8)
    begun = time.monotonic()
    dist.send(torch.tensor([size]), dst=other)
    dist.send(load, dst=other)
    dist.recv(load, src=other)
    return time.monotonic() - begun


def _echo(other: int) -> None:
    size = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.recv(size, src=other)
        if not size.item():
            return
        load = torch.empty(min(int(size.item()), MOST_BYTES), dtype=torch.uint8)
        dist.recv(load, src=other)
        dist.send(load, dst=other)


def check_links(links: Sequence[Link]) -> Finding:
    """Whether one pair of workers is much slower than the others: every round waits for it."""
    if not links:
        return ok("links", "no pair was measured")
    usual = median(link.bits_per_s for link in links)
    slowest = min(links, key=lambda link: link.bits_per_s)
    trip = max(links, key=lambda link: link.round_trip_s)
    shown = f"{len(links)} pairs, {rate(usual)} as a rule, slowest {slowest}; longest round trip {trip}"
    if len(links) == 1:
        shown = f"workers {slowest}"
    slow = [link for link in links if link.bits_per_s * MUCH_SLOWER < usual]
    if slow:
        often = max(
            range(1 + max(link.second for link in links)), key=lambda w: sum(w in (x.first, x.second) for x in slow)
        )
        return warning(
            "links",
            f"{shown}; {len(slow)} of them more than {MUCH_SLOWER:g} times slower, most often with worker {often}",
            "Every round waits for the slowest link. Look at that host's cable, Wi-Fi or VPN, or give it its own level "
            "of the plan.",
        )
    return ok("links", shown)


def links_from(said: Sequence[Mapping[str, float]]) -> list[Link]:
    """Links as another worker has told them."""
    return [Link(int(x["first"]), int(x["second"]), float(x["round_trip_s"]), float(x["bits_per_s"])) for x in said]


def rate(bits_per_s: float) -> str:
    """A rate in words.

    >>> rate(2.5e9), rate(94e6), rate(4e5)
    ('2.5 Gbit/s', '94 Mbit/s', '0.4 Mbit/s')
    """
    return f"{bits_per_s / 1e9:.3g} Gbit/s" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:.3g} Mbit/s"
