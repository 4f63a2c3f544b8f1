"""Round trip and rate from each worker to the next in the ring, the links that a ring all_reduce uses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from laconic.doctor.finding import Finding, ok, warning

REPEATS = 3
PING_BYTES = 8
TRANSFER_BYTES = 2**20
MUCH_SLOWER = 4.0
FAST_BITS_PER_S = 1e9  # a transfer takes too little time on faster links to compare them


@dataclass(frozen=True)
class MeasuredLink:
    """The measured link between two workers."""

    first: int
    second: int
    round_trip_s: float
    bits_per_s: float

    def __str__(self) -> str:
        return f"{self.first}-{self.second} ({rate(self.bits_per_s)}, {self.round_trip_s * 1e3:.1f} ms)"


def measure_link(worker: int, workers: int) -> MeasuredLink:
    """Measure the link to the next worker, on the default group. All workers measure at once, as in an all_reduce."""
    following, previous = (worker + 1) % workers, (worker - 1) % workers
    ping_s = min(_round_trip(following, previous, PING_BYTES) for _ in range(REPEATS))
    transfer_s = min(_round_trip(following, previous, TRANSFER_BYTES) for _ in range(REPEATS))
    return MeasuredLink(worker, following, ping_s, 16 * TRANSFER_BYTES / max(transfer_s - ping_s, transfer_s / 10))


def _round_trip(following: int, previous: int, size: int) -> float:
    """Return the seconds until `size` bytes came back from the next worker."""
    sent, received = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    dist.barrier()
    start = time.monotonic()
    there = dist.isend(sent, dst=following)
    dist.recv(received, src=previous)
    back = dist.isend(received, dst=previous)
    dist.recv(sent.clone(), src=following)
    took = time.monotonic() - start
    for work in (there, back):
        if work is not None:
            work.wait()
    return took


def check_links(links: Sequence[MeasuredLink]) -> Finding:
    """Check that no link is much slower than most."""
    usual = median(link.bits_per_s for link in links)
    slowest = min(links, key=lambda link: link.bits_per_s)
    latest = max(links, key=lambda link: link.round_trip_s)
    shown = f"median {rate(usual)}, slowest link {slowest}, longest round trip {latest}"
    if slowest.bits_per_s > min(FAST_BITS_PER_S, usual / MUCH_SLOWER):
        return ok("links", shown)
    return warning(
        "links",
        shown,
        "Every all_reduce waits for the slowest link.",
        "Look at the cable, Wi-Fi or VPN of these two hosts, or use a plan that synchronises less often across it.",
    )


def rate(bits_per_s: float) -> str:
    """Format a rate.

    >>> rate(2.5e9), rate(94e6), rate(4e5)
    ('2.5 Gbit/s', '94 Mbit/s', '0.4 Mbit/s')
    """
    return f"{bits_per_s / 1e9:.3g} Gbit/s" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:.3g} Mbit/s"
