"""The slow link: one host for each worker, joined as a `Link` says, for as long as a block runs.

The hosts are made by `namespaces.py`, in a process of its own that ends with this one. Where the system does not
allow them, `NoSlowLink` says why, and whoever asked computes the link's time instead.
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

from laconic.compare import namespaces
from laconic.compare.links import Link
from laconic.compare.namespaces import MOST_HOSTS, Hosts
from laconic.compare.settings import LabError

PROGRAM = Path(namespaces.__file__)
PATIENCE_S = 10.0


class NoSlowLink(Exception):
    """Hosts cannot be made here; the message says why, in a few words."""


@dataclass(frozen=True)
class SlowLink:
    """Hosts that are there, and the process that keeps them."""

    link: Link
    hosts: Hosts
    _keeper: subprocess.Popen[str]

    def uplink_bytes(self) -> dict[str, int]:
        """What each group has sent so far over the link that joins it to the others, level by level from 1."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.write("count\n")
        self._keeper.stdin.flush()
        sent: dict[str, int] = _answer(self._keeper)
        return {f"level {name[1:].replace('.', ', group ')}": count for name, count in sent.items()}


@contextmanager
def slow_link(link: Link) -> Iterator[SlowLink]:
    """Makes the hosts and removes them, whatever happens in the block."""
    if link.workers > MOST_HOSTS:
        raise LabError(f"--link {link}: {link.workers} hosts. There are addresses for {MOST_HOSTS}: use fewer.")
    if sys.platform != "linux":
        raise NoSlowLink("it takes Linux")
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise NoSlowLink(f"the command {command} of iproute2 is not installed")
    levels = [f"{level.count}@{level.rate_bps!r}" for level in link.levels]
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", str(PROGRAM), "keep", *levels],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process, which then ends the keeper
    )
    with keeper:
        try:
            yield SlowLink(link, _hosts(keeper), keeper)
        finally:
            keeper.kill()


def _hosts(keeper: "subprocess.Popen[str]") -> Hosts:
    made = _answer(keeper)
    if "error" in made:
        raise NoSlowLink(f"it takes root or user namespaces: {made['error']}")
    return Hosts(made["keeper"], tuple(made["cards"]), made["user"])


def _answer(keeper: "subprocess.Popen[str]") -> dict[str, Any]:
    assert keeper.stdout is not None
    line = keeper.stdout.readline()
    if not line:
        raise NoSlowLink(f"the process that makes hosts ended with code {keeper.wait(PATIENCE_S)}")
    answer: dict[str, Any] = json.loads(line)
    return answer
