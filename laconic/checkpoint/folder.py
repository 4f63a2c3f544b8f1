"""The folder of a run: generations by name, and what is on its way in or out.

    step-00000042          a generation: complete, or damaged since
    .step-00000043.tmp     being written; its writer holds a lock on it
    .step-00000042.old     set aside while another generation of that step takes its place
    .step-00000040.gone    being removed

A name without a dot appears and disappears by one rename. What a killed process leaves under the others, the next save
removes: a `tmp` only when the lock on it is free, an `old` only when its successor is in place.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from laconic.checkpoint.files import sync_folder
from laconic.checkpoint.generation import CheckpointError

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger("laconic.checkpoint")

_NAME = re.compile(r"(?:step-(\d{8,19}))|(?:\.step-(\d{8,19})\.(tmp|old|gone))", re.ASCII)


def name_of(step: int, way: str = "") -> str:
    """Name the folder of a step, or of a step on its way.

    >>> name_of(42), name_of(42, "tmp")
    ('step-00000042', '.step-00000042.tmp')
    """
    return f".step-{step:08d}.{way}" if way else f"step-{step:08d}"


def listing(folder: Path) -> dict[str, dict[int, Path]]:
    """What is there, by way ("" for in place) and step, oldest first. Other names are not ours and are left out."""
    found: dict[str, dict[int, Path]] = {"": {}, "tmp": {}, "old": {}, "gone": {}}
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return found
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error}. It should be a folder of checkpoints.") from error
    for name in names:
        match = _NAME.fullmatch(name)
        step, way = (int(match[1] or match[2]), match[3] or "") if match else (-1, "")
        if match and name == name_of(step, way):
            found[way][step] = folder / name
    return {way: dict(sorted(steps.items())) for way, steps in found.items()}


def in_place(folder: Path) -> dict[int, Path]:
    """Generations by step, oldest first; one that was set aside counts where its successor never came."""
    found = listing(folder)
    return dict(sorted((found["old"] | found[""]).items()))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a folder's lock, which the system frees when this process ends, however it ends."""
    if sys.platform == "win32":
        yield
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: then nobody sweeps there either
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _abandoned(path: Path) -> bool:
    """Whether a folder is this user's and nobody holds its lock."""
    if sys.platform == "win32":
        return False
    with suppress(OSError):
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(fd)
    return False


def make_temporary(folder: Path, step: int) -> Path:
    """Make the folder that a generation is written to, in place of one that a dead process has left."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
    path = folder / name_of(step, "tmp")
    if _abandoned(path):
        discard(path)
    try:
        path.mkdir()
    except FileExistsError as error:
        raise CheckpointError(
            f"{path} is there already: another process is saving step {step}, or has left it. "
            "Let one process save to a folder; if none does, remove it."
        ) from error
    return path


def sweep(folder: Path, spare: Path) -> None:
    """Remove what killed processes have left, all but `spare`, so that it takes no room from what comes."""
    found = listing(folder)
    for path in found["tmp"].values():
        if path != spare and _abandoned(path):
            logger.info("%s was left by a process that ended while saving; removed", path)
            discard(path)
    for step, path in found["old"].items():
        if step in found[""]:
            discard(path)
        else:
            with suppress(OSError):
                os.rename(path, folder / name_of(step))
    for path in found["gone"].values():
        discard(path)


def put_in_place(temporary: Path, step: int) -> Path:
    """Give a complete generation its name; one that has it already is set aside, then removed."""
    folder = temporary.parent
    final, old = folder / name_of(step), folder / name_of(step, "old")
    sync_folder(temporary)
    if os.path.lexists(final):
        discard(old)
        os.rename(final, old)
    try:
        os.rename(temporary, final)
    except OSError:
        if os.path.lexists(old):
            os.rename(old, final)
        raise
    sync_folder(folder)
    discard(old)
    return final


def discard(path: Path) -> None:
    """Remove a folder, or what stands in its place: first its name, at once, then what is in it."""
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
        if path.name.startswith("."):  # one in place stays whole rather than going bit by bit
            shutil.rmtree(path, ignore_errors=True)
