"""The folder of a run, which holds one folder for each checkpoint.

    step-00000042          a checkpoint: complete, or damaged since
    .step-00000043.tmp     being written; worker 0 holds a lock on it
    .step-00000042.old     replaced by another checkpoint of that step; it counts until that one is in place
    .step-00000040.gone    being removed

A name without a dot appears and disappears in one rename. The next save removes what a killed process left.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from laconic.checkpoint.atomic_write import fsync_folder
from laconic.checkpoint.records import CheckpointError

logger = logging.getLogger("laconic.checkpoint")

_NAME = re.compile(r"step-(\d{8,19})|\.step-(\d{8,19})\.(tmp|old|gone)", re.ASCII)


def folder_name(step: int, kind: str = "") -> str:
    """Return the name of a step's folder.

    >>> folder_name(42), folder_name(42, "tmp")
    ('step-00000042', '.step-00000042.tmp')
    """
    return f".step-{step:08d}.{kind}" if kind else f"step-{step:08d}"


def _listing(folder: Path) -> dict[str, dict[int, Path]]:
    """List the folders of a run by kind ("" for complete ones) and step. Other names are ignored."""
    found: dict[str, dict[int, Path]] = {"": {}, "tmp": {}, "old": {}, "gone": {}}
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return found
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error}. It should be a folder of checkpoints.") from error
    for match in filter(None, map(_NAME.fullmatch, names)):
        step, kind = int(match[1] or match[2]), match[3] or ""
        if match[0] == folder_name(step, kind):
            found[kind][step] = folder / match[0]
    return found


def complete(folder: Path) -> dict[int, Path]:
    """Return the checkpoints by step, oldest first."""
    found = _listing(folder)
    return dict(sorted((found["old"] | found[""]).items()))


def try_lock(fd: int) -> bool:
    """Lock an open folder until it is closed or the process ends, and return whether that worked."""
    with suppress(OSError):  # locked by another process, or a file system without locks
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _is_abandoned(path: Path) -> bool:
    """Whether a folder belongs to this user and nobody holds its lock."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
        try:
            return os.fstat(fd).st_uid == os.geteuid() and try_lock(fd)
        finally:
            os.close(fd)
    return False


def make_temporary(folder: Path, step: int) -> None:
    """Create the folder that a checkpoint is written to, in place of one that a dead process left."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        fsync_folder(folder.parent)
    path = folder / folder_name(step, "tmp")
    if _is_abandoned(path):
        discard(path)
    try:
        path.mkdir()
    except FileExistsError as error:
        raise CheckpointError(
            f"{path} already exists: another process is saving step {step}, or left it. "
            "Only one run may save to a folder. If no other does, remove it."
        ) from error


def sweep(folder: Path, spare: Path) -> None:
    """Remove what killed processes left, except `spare`."""
    found = _listing(folder)
    left = [path for path in found["tmp"].values() if path != spare and _is_abandoned(path)]
    left += [path for step, path in found["old"].items() if step in found[""]]
    for path in [*left, *found["gone"].values()]:
        logger.info("removed %s, left by a process that ended while saving", path)
        discard(path)


def put_in_place(temporary: Path, step: int) -> None:
    """Rename a complete checkpoint to its final name, replacing one of the same step."""
    folder = temporary.parent
    final, old = folder / folder_name(step), folder / folder_name(step, "old")
    fsync_folder(temporary)
    if os.path.lexists(final):
        discard(old)
        os.rename(final, old)
    os.rename(temporary, final)
    fsync_folder(folder)
    discard(old)


def discard(path: Path) -> None:
    """Remove a folder, or a file in its place: first its name, in one step, then its contents."""
    with suppress(OSError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
        gone = path.with_name(f".{path.name.removeprefix('.').partition('.')[0]}.gone")
        if gone != path:
            shutil.rmtree(gone, ignore_errors=True)
            with suppress(OSError):  # a full disk may have no room for another name
                os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)
        if path.name.startswith("."):  # a complete checkpoint stays whole if it could not be renamed
            shutil.rmtree(path, ignore_errors=True)
