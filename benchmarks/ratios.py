"""What benchmarks share: ratios as a file that bench.py reads, and the machine that they were measured on."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path


def write(path: str | Path | None, ratios: Mapping[str, float]) -> None:
    """Write ratios to a named peer in the same run, where lower is better; nothing without a path."""
    if path is not None:
        Path(path).write_text(json.dumps(dict(ratios), indent=1) + "\n")


def machine() -> str:
    """Return versions, processor and number of cores."""
    import torch

    import laconic

    return (
        f"laconic {laconic.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}, {processor()}, {os.cpu_count()} cores"
    )


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
