"""The machine: its cores, what tells it from others, what is installed, and versions that results depend on."""

from __future__ import annotations

import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import laconic

DISTRIBUTION = "laconic-train"
"""What pip installs. It installs `import laconic` and the command `laconic`."""


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


def pip_install(extra: str) -> str:
    """Return the command that installs what an extra needs.

    >>> pip_install("report")
    'pip install "laconic-train[report]"'
    """
    return f'pip install "{DISTRIBUTION}[{extra}]"'


def other_project() -> tuple[str, str, str] | None:
    """Return what is wrong if the other project is installed in this environment, too: found, why, way out."""
    try:
        found = version("laconic")
    except PackageNotFoundError:
        return None
    return (
        f'the distribution "laconic" {found} is installed beside {DISTRIBUTION}',
        "It is another project with the same import name and command: one overwrites files of the other.",
        f"pip uninstall laconic, then install {DISTRIBUTION} again, with --force-reinstall --no-deps.",
    )
