"""The folder of a run, which holds one folder for each checkpoint.

    step-00000042                  a checkpoint: complete, or damaged since
    .step-00000043.1f83d9ab.tmp    being written; worker 0 holds a lock on it
    .step-00000042.old             replaced by another checkpoint of that step; it counts until that one is in place
    .step-00000040.9b05688c.gone   being removed

A name without a dot appears and disappears in one rename. The next save removes what a killed process left. The random
part keeps a worker that an earlier run left behind from writing to the folder of a new run.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from laconic.checkpoint.tree import CheckpointError

logger = logging.getLogger("laconic.checkpoint")

_STEP = r"step-(\d{8}|[1-9]\d{8,18})"
_NAME = re.compile(rf"{_STEP}|\.{_STEP}\.(?:[0-9a-f]{{8}}\.)?(tmp|old|gone)", re.ASCII)


def final_path(folder: Path, step: int) -> Path:
    """Return the path of a complete checkpoint."""
    return folder / f"step-{step:08d}"


def _hidden(path: Path, kind: str) -> Path:
    """Return a new, hidden path beside a folder, with the same step."""
    return path.with_name(f".{path.name.strip('.').partition('.')[0]}.{secrets.token_hex(4)}.{kind}")


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
        found[match[3] or ""][int(match[1] or match[2])] = folder / match[0]
    return found


def complete(folder: Path) -> dict[int, Path]:
    """Return the checkpoints by step, oldest first."""
    found = _listing(folder)
    return dict(sorted((found["old"] | found[""]).items()))


def find_temporary(folder: Path, step: int) -> Path | None:
    """Return the folder in which a step is being written."""
    return _listing(folder)["tmp"].get(step)


def make_temporary(folder: Path, step: int) -> Path:
    """Create the folder that a checkpoint is written to."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        fsync_folder(folder.parent)
    if other := find_temporary(folder, step):
        raise CheckpointError(
            f"{other} already exists: another process is saving step {step}, or left it. "
            "Only one run may save to a folder. If no other does, remove it."
        )
    path = _hidden(final_path(folder, step), "tmp")
    path.mkdir()
    return path


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Lock a folder while it is written to, also against other processes; yield whether that worked."""
    fd, free = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY), False
    try:
        with suppress(OSError):  # locked by another process, or a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        yield free
    finally:
        os.close(fd)


def _is_abandoned(path: Path) -> bool:
    with suppress(OSError), locked(path) as free:
        return free
    return False


def sweep(folder: Path) -> None:
    """Remove what killed processes left."""
    found = _listing(folder)
    replaced = [path for step, path in found["old"].items() if step in found[""]]
    for path in [*filter(_is_abandoned, found["tmp"].values()), *found["gone"].values(), *replaced]:
        logger.info("removed %s, left by a process that ended while saving", path)
        discard(path)


def put_in_place(temporary: Path, step: int) -> None:
    """Rename a complete checkpoint to its final name, replacing one of the same step."""
    final = final_path(temporary.parent, step)
    old = final.with_name(f".{final.name}.old")
    fsync_folder(temporary)
    if os.path.lexists(final):
        os.rename(final, old)
    os.rename(temporary, final)
    fsync_folder(final.parent)
    discard(old)


def discard(path: Path) -> None:
    """Remove a folder, or a file in its place: first its name, in one step, then its contents."""
    with suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            os.unlink(path)
            return
        gone = _hidden(path, "gone")
        with suppress(OSError):  # a full disk may have no room for another name
            os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)
        if path.name.startswith("."):  # a complete checkpoint stays whole if it could not be renamed
            shutil.rmtree(path, ignore_errors=True)


def fsync_folder(path: Path) -> None:
    """Make renames inside a folder survive a crash."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
