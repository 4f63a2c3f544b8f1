"""Links: the bandwidth of a network at each level, and a network that is made of such links.

    link("100mbit", workers=4)                  four workers, each with a link of 100 Mbit/s
    link("2 @ 1gbit, 2 @ 50mbit", workers=4)    two workers per site at 1 Gbit/s, two sites connected by 50 Mbit/s

Levels are innermost first. Rates are in bits (`50mbit`, `50Mb/s`) or bytes (`6MB/s`) per second.

`slow_link` makes such a network: one host for each worker. A separate process makes the hosts (`namespaces.py`) and
ends with this one. Where the system does not allow them, `NoSlowLink` gives the reason, and the caller may compute the
time of the link instead.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from laconic.tools.errors import UsageError
from laconic.tools.launch import namespaces
from laconic.tools.launch.namespaces import MOST_HOSTS, Hosts
from laconic.tools.units import RATE, counted, parse, rate_text

PROGRAM = Path(namespaces.__file__)
EXIT_TIMEOUT_S = 10.0
SEGMENT_BYTES = 1 << 20
MESSAGES = 3  # per segment
MESSAGE_BYTES = 48 + 66  # the header of gloo; those of TCP, IP and Ethernet


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
    def machine(self) -> int | None:
        """The workers of one machine: the innermost level of several."""
        return self.levels[0].count if len(self.levels) > 1 else None

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


class NoSlowLink(Exception):
    """Hosts cannot be made here. The message is the reason."""


@dataclass(frozen=True)
class SlowLink:
    """The hosts of a link, and the process that keeps them."""

    link: Link
    hosts: Hosts
    _keeper: subprocess.Popen[str]

    def uplink_bytes(self) -> dict[str, int]:
        """The bytes that each group has sent to the others so far, by level from 1."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.write("count\n")
        self._keeper.stdin.flush()
        sent: dict[str, int] = _answer(self._keeper)
        return {f"level {name[1:].replace('.', ', group ')}": count for name, count in sent.items()}


@contextmanager
def slow_link(link: Link) -> Iterator[SlowLink]:
    """Make the hosts, and remove them at the end of the block in any case."""
    if link.workers > MOST_HOSTS:
        raise UsageError(f"--link {link}: {link.workers} hosts. There are addresses for {MOST_HOSTS}: use fewer.")
    if sys.platform != "linux":
        raise NoSlowLink("it needs Linux")
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise NoSlowLink(f"the command {command} of iproute2 is not installed")
    levels = [f"{level.count}@{level.rate_bps!r}" for level in link.levels]
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", str(PROGRAM), "keep", *levels],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the keeper
    )
    with keeper:
        try:
            made = _answer(keeper)
            if "error" in made:
                raise NoSlowLink(f"it needs root or user namespaces: {made['error']}")
            yield SlowLink(link, Hosts(**made), keeper)
        finally:
            keeper.kill()


def _answer(keeper: subprocess.Popen[str]) -> dict[str, Any]:
    assert keeper.stdout is not None
    line = keeper.stdout.readline()
    if not line:
        raise NoSlowLink(f"the process that makes hosts ended with code {keeper.wait(EXIT_TIMEOUT_S)}")
    answer: dict[str, Any] = json.loads(line)
    return answer


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
