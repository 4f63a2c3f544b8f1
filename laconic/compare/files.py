"""Writes result files, completely or not at all."""

import os
import platform
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch


def versions() -> dict[str, str]:
    """The versions that results depend on."""
    return {"laconic": version("laconic"), "torch": torch.__version__, "python": platform.python_version()}


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, or leave the old one unchanged: write a temporary file, then rename it."""
    temporary = temporary_beside(path)
    temporary.write_bytes(content)
    temporary.chmod(0o666 & ~_umask())
    temporary.replace(path)


def temporary_beside(path: Path) -> Path:
    """Make an empty temporary file in the same folder."""
    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    os.close(handle)
    return Path(name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
