"""Links: the bandwidth of a network at each level, and a link that is measured.

    link("100mbit", workers=4)                  four workers, each with a link of 100 Mbit/s
    link("2 @ 1gbit, 2 @ 50mbit", workers=4)    two workers per site at 1 Gbit/s, two sites connected by 50 Mbit/s

Levels are innermost first. Rates are in bits (`50mbit`, `50Mb/s`) or bytes (`6MB/s`) per second.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import prod

from laconic.tools.errors import UsageError
from laconic.tools.units import RATE, counted, parse, rate_text

SEGMENT_BYTES = 1 << 20
MESSAGES = 3  # per segment
MESSAGE_BYTES = 48 + 66  # the header of gloo; those of TCP, IP and Ethernet
REPEATS, PING_BYTES, TRANSFER_BYTES = 3, 8, 1 << 20  # of a measured link


@dataclass(frozen=True)
class Level:
    """A number of workers, or of groups, each connected to the others by a link of this rate."""

    count: int
    rate_bps: float


@dataclass(frozen=True)
class Link:
    """The levels of a network, innermost first.

    >>> slow = link("2 @ 1gbit, 2 @ 50mbit", workers=4)
    >>> slow.workers, slow.slowest_bps
    (4, 50000000.0)
    >>> print(slow)
    2 @ 1gbit, 2 @ 50mbit
    """

    levels: tuple[Level, ...]

    @property
    def workers(self) -> int:
        """The number of workers in all levels."""
        return prod(level.count for level in self.levels)

    @property
    def slowest_bps(self) -> float:
        """The rate of the slowest level that traffic crosses."""
        crossed = [level.rate_bps for level in self.levels if level.count > 1]
        return min(crossed, default=self.levels[0].rate_bps)

    @property
    def sharing(self) -> int:
        """How many neighbouring workers share one of the slowest links.

        >>> link("8 @ 300GB/s, 4 @ 1Gb/s").sharing, link("1gbit", workers=4).sharing
        (8, 1)
        """
        crossed = [index for index, level in enumerate(self.levels) if level.count > 1]
        slowest = min(reversed(crossed), key=lambda index: self.levels[index].rate_bps, default=0)
        return prod(level.count for level in self.levels[:slowest])

    def inside(self, workers: int) -> Link:
        """The innermost levels that a group of `workers` neighbours uses.

        >>> print(link("2 @ 1gbit, 2 @ 50mbit").inside(2))
        1gbit
        """
        reach = 0
        while reach < len(self.levels) - 1 and prod(level.count for level in self.levels[: reach + 1]) < workers:
            reach += 1
        return Link(self.levels[: reach + 1])

    def __str__(self) -> str:
        if len(self.levels) == 1:
            return rate_text(self.levels[0].rate_bps)
        return ", ".join(f"{level.count} @ {rate_text(level.rate_bps)}" for level in self.levels)


def link(text: str, workers: int | None = None) -> Link:
    """Parse a link. A rate alone is one level of `workers` workers.

    >>> link("6MB/s", workers=2).levels
    (Level(count=2, rate_bps=48000000.0),)
    >>> link("2 @ fast", workers=2)
    Traceback (most recent call last):
    laconic.tools.errors.UsageError: --link 2 @ fast: write a rate of at least 1kbit: ...
    """
    if "," not in text and "@" not in text:
        return Link((Level(workers or 1, parse(text, RATE, "--link")),))
    found = Link(tuple(Level(*counted(level.strip(), RATE, "--link")) for level in text.split(",")))
    if workers is not None and workers != found.workers:
        counts = " x ".join(str(level.count) for level in found.levels)
        raise UsageError(
            f"--link {text}: these levels hold {counts} = {found.workers} workers, and {workers} were asked for. "
            "Change one of the two, or leave out the number of workers."
        )
    return found


def framing_bytes(op: str, payload_bytes: int, workers: int) -> int:
    """The bytes of headers that gloo and TCP add to a collective, for one worker.

    The ring of gloo splits each worker's share into two segments, or into more so that none exceeds 1 MiB. For each
    segment a worker sends three messages: ready to send, ready to receive, and the segment.

    >>> framing_bytes("all_reduce", 68_000, workers=4)
    4104
    """
    if workers < 2:
        return 0
    if op != "all_reduce":
        return (workers - 1) * MESSAGES * MESSAGE_BYTES
    segments = max(2, -(-payload_bytes // (SEGMENT_BYTES * workers)))
    return 2 * (workers - 1) * segments * MESSAGES * MESSAGE_BYTES


def measure_link(worker: int, workers: int) -> tuple[float, float]:
    """Measure the link to the next worker on the default group: the round trip in seconds, and the rate in bit/s.

    All workers call it, and measure at once, as in a ring all_reduce.
    """
    following, previous = (worker + 1) % workers, (worker - 1) % workers
    ping_s = min(_round_trip_s(following, previous, PING_BYTES) for _ in range(REPEATS))
    transfer_s = min(_round_trip_s(following, previous, TRANSFER_BYTES) for _ in range(REPEATS))
    return ping_s, 16 * TRANSFER_BYTES / max(transfer_s - ping_s, transfer_s / 10)


def _round_trip_s(following: int, previous: int, size: int) -> float:
    """Return the seconds until `size` bytes came back from the next worker."""
    import torch  # which takes a second or more, and links are parsed without it
    import torch.distributed as dist

    sent, received, returned = torch.zeros(3, size, dtype=torch.uint8)
    dist.barrier()
    start = time.perf_counter()
    sends = [dist.isend(sent, dst=following)]
    dist.recv(received, src=previous)
    sends.append(dist.isend(received, dst=previous))
    dist.recv(returned, src=following)
    took = time.perf_counter() - start
    for work in filter(None, sends):
        work.wait()
    return took
