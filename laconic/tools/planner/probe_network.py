"""Measures collectives at several sizes, through the queue that trains with them, and the links between hosts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.exchange import AllToAll, Exchange, Gather, Mean, Request
from laconic.ledger import wire_bytes
from laconic.tools.planner.meter import Meter
from laconic.tools.planner.probe_data import LinkTiming, Timing

SIZES, SMALLEST_BYTES, MOST_BYTES = 6, 1 << 10, 32 << 20
"""How many sizes are measured, the smallest payload, and what a worker sends at most."""
LEAST_REPEATS, MOST_REPEATS, REPEAT_S = 3, 10, 0.5
"""Collectives are repeated for about REPEAT_S, within these limits."""
PINGS, FIRST_BYTES, LINK_S, MOST_LINK_S, LINK_BYTES = 11, 64 << 10, 0.1, 0.5, 16 << 20
"""Messages over a link grow by factors of four, until one takes LINK_S; one of MOST_LINK_S is not repeated."""
ONE_BY_ONE_HOSTS = 8
"""Up to so many hosts, one pair after the other is measured."""


def time_collective(meter: Meter, op: str, level: str, workers: int, longest_s: float) -> list[Timing]:
    """Measure a collective at six sizes, up to the one that takes about `longest_s`, in all groups at the same time."""
    largest = _largest_bytes(meter, op, workers, longest_s)
    return [
        Timing(op, level, workers, size, _samples(meter, op, workers, size))
        for size in sizes(largest, step=4 * workers)
    ]


def sizes(largest: int, step: int) -> list[int]:
    """Return six sizes with equal ratios, multiples of `step`.

    >>> sizes(1 << 20, step=16)
    [1024, 4096, 16384, 65536, 262144, 1048576]
    """
    ratio = (max(largest, 2 * SMALLEST_BYTES) / SMALLEST_BYTES) ** (1 / (SIZES - 1))
    return [max(1, round(SMALLEST_BYTES * ratio**i / step)) * step for i in range(SIZES)]


def _largest_bytes(meter: Meter, op: str, workers: int, longest_s: float) -> int:
    """Find the payload that takes `longest_s`, or of which a worker sends MOST_BYTES. This also warms up."""
    size, most = SMALLEST_BYTES, MOST_BYTES * SMALLEST_BYTES // max(1, wire_bytes(op, SMALLEST_BYTES, workers))
    while True:
        (took_s,) = meter.slowest([_once(meter, op, workers, size)])
        if took_s > longest_s / 2 or size >= most:
            return int(min(most, size * longest_s / took_s))
        size = min(most, 4 * size)


def _samples(meter: Meter, op: str, workers: int, size: int) -> tuple[float, ...]:
    first = meter.slowest([_once(meter, op, workers, size)])
    repeats = min(MOST_REPEATS, max(LEAST_REPEATS, int(REPEAT_S / first[0]))) - 1
    return first + meter.slowest([_once(meter, op, workers, size) for _ in range(repeats)])


def _once(meter: Meter, op: str, workers: int, size: int) -> float:
    request = _request(op, workers, max(4 * workers, size // (4 * workers) * 4 * workers), meter.wire)
    meter.start_together()
    start = meter.now()
    meter.queue_of(workers).run(_serve(request), "probe")
    return meter.now() - start


def _request(op: str, workers: int, size: int, device: torch.device) -> Request:
    x = torch.zeros(size // 4, device=device)
    if op == "all_to_all":
        return AllToAll(x, (len(x) // workers,) * workers)
    return Mean(x) if op == "all_reduce" else Gather(x)


def _serve(request: Request) -> Exchange[None]:
    yield request


def time_links(meter: Meter, show: Callable[[float], None]) -> tuple[list[LinkTiming], bool]:
    """Measure the links between all hosts, and return whether pairs were measured at the same time.

    Up to eight hosts, one pair after the other: pairs may share a link. For more, all pairs of a round together.
    """
    count = len(meter.hosts)
    together = count > ONE_BY_ONE_HOSTS
    rounds = tournament(count) if together else [[pair] for pair in combinations(range(count), 2)]
    leaders = [host[0] for host in meter.hosts]
    own = torch.zeros(count, 2, dtype=torch.float64)  # latency and bandwidth, from each host to this one
    for index, pairs in enumerate(rounds):
        show(index / len(rounds))
        meter.start_together()
        for a, b in pairs:
            if meter.worker in (leaders[a], leaders[b]):
                other = b if meter.worker == leaders[a] else a
                own[other] = torch.tensor(_time_link(meter, leaders[other], first=other == b))
    measured = meter.world.gather(own)
    found = []
    for sender in range(count):
        for receiver in range(count):
            if sender != receiver:
                latency_s, bandwidth_bps = measured[leaders[receiver], sender].tolist()
                found.append(LinkTiming(sender, receiver, latency_s, bandwidth_bps))
    return found, together


def tournament(hosts: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs in which each host meets every other once (the circle method).

    >>> tournament(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    even = hosts + hosts % 2  # with an odd number, one host rests
    circle = list(range(1, even))
    rounds = []
    for _ in range(even - 1):
        order = [0, *circle]
        pairs = [(order[i], order[-1 - i]) for i in range(even // 2)]
        rounds.append(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < hosts))
        circle = [circle[-1], *circle[:-1]]
    return rounds


def _time_link(meter: Meter, peer: int, first: bool) -> tuple[float, float]:
    """Measure latency and bandwidth from a peer, which calls this at the same time, with the other `first`."""
    ping_s = median(_ping_s(meter, peer, first) for _ in range(PINGS))
    peer_ping_s = _seconds_of(meter, peer, ping_s)
    latency_s = (ping_s if first else peer_ping_s) / 2  # the other's clock starts before it is asked
    size, times = FIRST_BYTES, [_swap_s(meter, peer, FIRST_BYTES)]
    while max(times[-1]) < LINK_S and size < LINK_BYTES:
        size *= 4
        times.append(_swap_s(meter, peer, size))
    own = [each[0] for each in times]
    if (
        len(own) > 1 and own[-1] > 1.5 * own[-2]
    ):  # the slope: without latency, and without what a token bucket lets pass
        return latency_s, 8 * (size - size // 4) / (own[-1] - own[-2])
    return latency_s, 8 * size / own[-1]


def _ping_s(meter: Meter, peer: int, first: bool) -> float:
    byte = torch.zeros(1, dtype=torch.uint8, device=meter.wire)
    start = meter.now()
    for sends in (first, not first):
        if sends:
            dist.send(byte, peer)
        else:
            dist.recv(byte, peer)
    return meter.now() - start


def _swap_s(meter: Meter, peer: int, size: int) -> tuple[float, float]:
    """Exchange `size` bytes both ways; return the median seconds until those of the peer are here, and the peer's."""
    message = torch.zeros(size, dtype=torch.uint8)
    times: list[float] = []
    for _ in range(LEAST_REPEATS):
        _swap(meter, peer, torch.zeros(1))  # start together
        times.append(_swap(meter, peer, message)[1])
        if max(times[-1], _seconds_of(meter, peer, times[-1])) > MOST_LINK_S:
            break
    return median(times), _seconds_of(meter, peer, median(times))


def _seconds_of(meter: Meter, peer: int, own_s: float) -> float:
    """Return the peer's seconds, and give it this worker's."""
    return float(_swap(meter, peer, torch.tensor([own_s], dtype=torch.float64))[0])


def _swap(meter: Meter, peer: int, message: Tensor) -> tuple[Tensor, float]:
    """Send a message to a peer; return the peer's, and the seconds until it was here."""
    outbox = message.to(meter.wire)
    inbox = torch.empty_like(outbox)
    start = meter.now()
    works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, inbox, peer), dist.P2POp(dist.isend, outbox, peer)])
    works[0].wait()
    took_s = meter.now() - start
    for work in works[1:]:
        work.wait()
    return inbox, took_s
