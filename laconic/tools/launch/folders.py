"""Temporary folders for the files of a run, which are also removed after a process that was killed.

Each folder has a file that its owner keeps locked. The kernel releases the lock when the owner ends. Each new run
removes this user's folders whose lock is free.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":  # where a locked file cannot be renamed, and no folder is removed later
    import fcntl

PREFIX = "laconic-run-"
LOCK = "owner.lock"


@contextmanager
def run_folder() -> Iterator[Path]:
    """Make a folder, and remove it at the end of the block. If this process is killed, the next run removes it."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        if sys.platform == "win32":
            yield Path(name)
        else:
            remove_abandoned(Path(tempfile.gettempdir()))
            # lock the file before it has the name that other processes look for
            new = Path(name, f"{LOCK}.new")
            with new.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                new.rename(Path(name, LOCK))
                yield Path(name)


def remove_abandoned(place: Path) -> None:
    """Remove the folders in `place` that processes of this user left behind."""
    if sys.platform == "win32":
        return
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with (folder / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
