"""Results as files: what goes into them, and how they are written, whole or not at all."""

import json
import math
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch

from laconic.compare.lab.training import Outcome


def as_json(outcomes: Sequence[Outcome]) -> str:
    """A list with one object for each plan."""
    rows = [_finite(asdict(outcome) | {"versions": versions()}) for outcome in outcomes]
    return json.dumps(rows, indent=1, allow_nan=False) + "\n"


def versions() -> dict[str, str]:
    """The versions that decide results."""
    return {"laconic": version("laconic"), "torch": torch.__version__, "python": platform.python_version()}


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file, or leaves the old one as it was."""
    temporary = temporary_beside(path)
    temporary.write_bytes(content)
    temporary.chmod(0o666 & ~_umask())
    temporary.replace(path)


def temporary_beside(path: Path) -> Path:
    """A new, empty file in the same folder."""
    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    os.close(handle)
    return Path(name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _finite(value: object) -> object:
    """JSON has no NaN and no infinity: a loss that became one is null."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
