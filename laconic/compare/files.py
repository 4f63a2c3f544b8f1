"""Writes result files, completely or not at all."""

import platform
import uuid
from importlib.metadata import version
from pathlib import Path

import torch


def versions() -> dict[str, str]:
    """The versions that results depend on."""
    return {"laconic": version("laconic"), "torch": torch.__version__, "python": platform.python_version()}


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, or leave the old one unchanged: write a temporary file, then rename it."""
    write_temporary(path, content).replace(path)


def write_temporary(path: Path, content: bytes = b"") -> Path:
    """Write a new file in the same folder, and return its path."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with temporary.open("xb") as file:
        file.write(content)
    return temporary
