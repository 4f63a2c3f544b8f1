"""Folders for a run's files, also removed after a process that could not remove its own.

Each folder holds a file that its owner keeps locked; the kernel drops the lock when the owner ends, however it ends.
Whoever starts next removes folders whose lock is free, and so never one that is in use, nor one of another user.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":  # where a locked file cannot be renamed, and nothing is swept
    import fcntl

PREFIX = "laconic-run-"
LOCK = "owner.lock"


@contextmanager
def run_folder() -> Iterator[Path]:
    """A new folder, removed at the end of the block, or by the next one if this process is killed."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        if sys.platform == "win32":
            yield Path(name)
        else:
            remove_abandoned(Path(tempfile.gettempdir()))
            # locked before it gets the name by which others know it
            fresh = Path(name, f"{LOCK}.new")
            with fresh.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                fresh.rename(Path(name, LOCK))
                yield Path(name)


def remove_abandoned(place: Path) -> None:
    """Removes the folders in `place` that this user's dead processes have left."""
    if sys.platform == "win32":
        return
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with (folder / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
