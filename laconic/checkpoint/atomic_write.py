"""Write files that are complete or absent, also after a crash or on a full disk."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace a file in one step: write and fsync a temporary file beside it, then rename it.

    On an error the old file stays as it was. The mode of an existing file is kept.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        write_synced(temporary, data)
        with suppress(FileNotFoundError):
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(target.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file that does not exist yet, and fsync it."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fsync_folder(path: Path) -> None:
    """Make renames inside a folder survive a crash."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
