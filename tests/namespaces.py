"""Several hosts on one machine: network namespaces joined by a bridge. For tests that run as root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

needs_root = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for network namespaces"
    ),
]


def ip(*words: str) -> str:
    """Run the `ip` command."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def hosts(count: int) -> Iterator[list[tuple[str, str]]]:
    """Make `count` hosts on one switch; yield their names and addresses; remove them whatever happens."""
    tag = f"lt{os.getpid() % 100_000}"
    with ExitStack() as undo:
        for name in [f"{tag}s", *(f"{tag}h{index}" for index in range(count))]:
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
        switch = f"{tag}s"
        ip("-n", switch, "link", "add", "name", "bridge0", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge0", "up")
        made = []
        for index in range(count):
            host, address = f"{tag}h{index}", f"10.77.0.{index + 1}"
            ip("-n", host, "link", "add", "name", "eth0", "type", "veth", "peer", "name", f"p{index}", "netns", switch)
            ip("-n", switch, "link", "set", f"p{index}", "master", "bridge0", "up")
            ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")
            ip("-n", host, "link", "set", "lo", "up")
            made.append((host, address))
        yield made
