"""The folder of a run, which holds one folder for each checkpoint.

    step-00000042                  a checkpoint: complete, or damaged since
    .step-00000043.1f83d9ab.tmp    being written
    .step-00000041.5be0cd19.gone   being removed
    .step-00000042.old             replaced by another checkpoint of that step; it counts until that one is in place

A name without a dot appears and disappears in one rename. The next save removes what a killed process left. The random
part keeps a worker that an earlier run left behind from writing to the folder of a new run.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from laconic.errors import CheckpointError

_NAME = re.compile(
    r"(?P<dot>\.?)step-(?P<step>\d{8}|[1-9]\d{8,18})(?P<kind>|\.old|\.[0-9a-f]{8}\.(tmp|gone))", re.ASCII
)


def final_path(folder: Path, step: int) -> Path:
    """Return the path of a complete checkpoint."""
    return folder / f"step-{step:08d}"


def temporary_path(folder: Path, step: int) -> Path:
    """Return a new, hidden path for a checkpoint that is being written."""
    return folder / f".step-{step:08d}.{secrets.token_hex(4)}.tmp"


def _old_path(folder: Path, step: int) -> Path:
    return folder / f".step-{step:08d}.old"


def _listed(folder: Path, kind: str) -> list[tuple[int, Path]]:
    """Return what there is of a kind ("", ".old", ".tmp" or ".gone"), with its step. Other names are ignored."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error}. It should be a folder of checkpoints.") from error
    matches = [match for match in map(_NAME.fullmatch, names) if match and bool(match["dot"]) == bool(match["kind"])]
    found = [match for match in matches if (match["kind"].endswith(kind) if kind else not match["kind"])]
    return [(int(match["step"]), folder / match[0]) for match in found]


def complete(folder: Path) -> dict[int, Path]:
    """Return the checkpoints by step, oldest first."""
    return dict(sorted((dict(_listed(folder, ".old")) | dict(_listed(folder, ""))).items()))


def find_temporary(folder: Path, step: int) -> Path | None:
    """Return the folder in which a step is being written."""
    return dict(_listed(folder, ".tmp")).get(step)


def make_temporary(folder: Path, step: int) -> Path:
    """Create the folder that a checkpoint is written to, and remove what killed processes left."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        fsync_folder(folder.parent)
    final = dict(_listed(folder, ""))
    replaced = [(each, path) for each, path in _listed(folder, ".old") if each in final]
    for _, path in [*_listed(folder, ".tmp"), *_listed(folder, ".gone"), *replaced]:
        discard(path)
    path = temporary_path(folder, step)
    path.mkdir()
    return path


def put_in_place(temporary: Path, step: int) -> None:
    """Rename a complete checkpoint to its final name, replacing one of the same step."""
    folder = temporary.parent
    final, old = final_path(folder, step), _old_path(folder, step)
    fsync_folder(temporary)
    if os.path.lexists(final):
        os.rename(final, old)
    os.rename(temporary, final)
    fsync_folder(folder)
    discard(old)


def discard(path: Path) -> None:
    """Remove a checkpoint: it loses its name in one step, and then its contents. A link is not followed.

    So another worker that still writes to it fails, and cannot leave a file in it that keeps the folder there: the
    others wait until its name is gone.
    """
    match = _NAME.fullmatch(path.name)
    with suppress(OSError):
        if path.is_symlink():
            os.unlink(path)
            return
        gone = path
        if match is not None:
            gone = path.with_name(f".step-{int(match['step']):08d}.{secrets.token_hex(4)}.gone")
            try:
                os.rename(path, gone)
            except OSError:
                if not match["dot"]:  # a complete checkpoint stays whole if it cannot be renamed
                    raise
                gone = path
        shutil.rmtree(gone, ignore_errors=True)


def fsync_folder(path: Path) -> None:
    """Make renames inside a folder survive a crash."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
