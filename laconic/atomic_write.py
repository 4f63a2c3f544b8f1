"""Write a file completely or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file by `data`, or leave it as it is on an error: write a temporary file, sync it, rename it.

    The file keeps its mode. A symbolic link is replaced, not followed.
    """
    temporary = write_temporary(path, data)
    try:
        if path.exists():
            temporary.chmod(path.stat().st_mode & 0o7777)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_temporary(path: Path, data: bytes = b"") -> Path:
    """Write a new file beside `path`, and return its path."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
