"""Temporary folders for the files of a run, which are also removed after a process that was killed.

Each folder has a file that its owner keeps locked. The kernel releases the lock when the owner ends. Each new run
removes this user's folders whose lock is free, and ends the processes of their workers that still run.
"""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":  # where a locked file cannot be renamed, and no folder is removed later
    import fcntl

PREFIX = "laconic-run-"
LOCK = "owner.lock"
RUN_VARIABLE = "LACONIC_RUN_FOLDER"
"""The environment variable that workers, and the processes that they start, have from the run that started them."""


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
    """Remove the folders in `place` that processes of this user left behind, and end what their workers left behind.

    The kernel kills a worker whose launcher was killed, but not the processes that the worker has started.
    """
    if sys.platform == "win32":
        return
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with (folder / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _end_processes(folder)
                shutil.rmtree(folder, ignore_errors=True)


def _end_processes(folder: Path) -> None:
    wanted = f"{RUN_VARIABLE}={folder}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # of another user, or ended
            if wanted in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)
