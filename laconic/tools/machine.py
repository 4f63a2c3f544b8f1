"""The machine: its cores, what tells it from others, and the versions that results depend on."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path

import laconic


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_id() -> str:
    """Return what tells hosts apart: the name, the kernel's boot id and the network namespace."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    parts = [boot.read_text().strip(), os.readlink(network)] if boot.exists() and network.exists() else []
    return " ".join([socket.gethostname(), *parts])


def versions() -> dict[str, str]:
    """The versions that results depend on, and that must fit together."""
    import torch  # which takes a second or more

    return {"laconic": laconic.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
