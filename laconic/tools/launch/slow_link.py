"""A slow link: one host for each worker, connected as a `Link` describes, while a block runs.

A separate process makes the hosts (`namespaces.py`) and ends with this one. Where the system does not allow them,
`NoSlowLink` gives the reason, and the caller computes the time of the link instead.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laconic.tools.errors import UsageError
from laconic.tools.launch import namespaces
from laconic.tools.launch.links import Link
from laconic.tools.launch.namespaces import MOST_HOSTS, Hosts

PROGRAM = Path(namespaces.__file__)
EXIT_TIMEOUT_S = 10.0


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


def _answer(keeper: "subprocess.Popen[str]") -> dict[str, Any]:
    assert keeper.stdout is not None
    line = keeper.stdout.readline()
    if not line:
        raise NoSlowLink(f"the process that makes hosts ended with code {keeper.wait(EXIT_TIMEOUT_S)}")
    answer: dict[str, Any] = json.loads(line)
    return answer
