"""Files as faults and strangers leave them: opened without following, read without running, written to the disk itself.

Whatever is found in a checkpoint's folder is input. A name may be a link, a pipe or a directory; a file may be cut,
grown or somebody else's. Every finding is a `CheckpointError`, never a hang and never a surprise of another type.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from laconic.checkpoint.generation import CheckpointError

JSON_BYTES = 64 << 20
"""No JSON of a checkpoint is longer; what would be is refused, on writing and on reading."""

_CHUNK_BYTES = 8 << 20
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


@dataclass(frozen=True)
class Facts:
    """What a manifest says of a file."""

    size_bytes: int
    sha256: str


@contextmanager
def opened(path: Path) -> Iterator[FileIO]:
    """Open a regular file, and nothing else: no link is followed, no pipe is waited for."""
    try:
        _require_regular(path, os.lstat(path))  # first, as opening a device may already do something
        file = FileIO(os.open(path, _READ))
    except OSError as error:
        raise _unreadable(path, error) from error
    with file:
        _require_regular(path, os.fstat(file.fileno()))
        try:
            yield file
        except OSError as error:
            raise _unreadable(path, error) from error


def _require_regular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path.name} is {_kind(found)}, where a checkpoint has regular files only.")


def require_folder(path: Path) -> None:
    """Make sure that a folder is one, and not a link to one."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISDIR(found.st_mode):
        raise CheckpointError(f"{path.name} is {_kind(found)}, where a generation is a folder.")


def _kind(found: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(found.st_mode), "a device")


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointError(f"{path.name} is missing.")
    return CheckpointError(f"{path.name} cannot be read: {error.strerror or error}.")


def size_of(path: Path) -> int:
    """Tell the size of a regular file."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    _require_regular(path, found)
    return found.st_size


def check_size(path: Path, size_bytes: int, facts: Facts) -> None:
    """Make sure that a file is as long as its manifest says."""
    if size_bytes != facts.size_bytes:
        raise CheckpointError(
            f"{path.name} has {size_bytes} bytes, and the manifest says {facts.size_bytes}: it was cut, or grew."
        )


def check_digest(file: FileIO, path: Path, facts: Facts) -> None:
    """Make sure that an open file is the one of the manifest, and go back to its start."""
    check_size(path, os.fstat(file.fileno()).st_size, facts)
    digest = hashlib.sha256()
    for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
        digest.update(chunk)
    if digest.hexdigest() != facts.sha256:
        raise CheckpointError(
            f"{path.name} has the SHA-256 {digest.hexdigest()}, and the manifest says {facts.sha256}: "
            "its bytes are not those that were saved."
        )
    file.seek(0)


def read_exactly(file: FileIO, size_bytes: int, path: Path) -> bytearray:
    """Read so many bytes, no fewer."""
    data = bytearray(size_bytes)
    fill(file, memoryview(data), path)
    return data


def fill(file: FileIO, target: memoryview, path: Path) -> None:
    """Read until `target` is full."""
    while len(target):
        got = file.readinto(target[:_CHUNK_BYTES])
        if not got:
            raise CheckpointError(f"{path.name} ended {len(target)} bytes too early: it was cut while it was read.")
        target = target[got:]


def read_bounded(path: Path, limit_bytes: int = JSON_BYTES) -> bytes:
    """Read a whole small file."""
    with opened(path) as file:
        return read_small(file, path, limit_bytes)


def read_small(file: FileIO, path: Path, limit_bytes: int = JSON_BYTES) -> bytes:
    """Read all of an open file, and refuse one that is not small before reading it."""
    size_bytes = os.fstat(file.fileno()).st_size
    if size_bytes > limit_bytes:
        raise CheckpointError(f"{path.name} has {size_bytes} bytes, and {limit_bytes} is the most for such a file.")
    return bytes(read_exactly(file, size_bytes, path))


def parse_json(data: bytes, what: str) -> Any:
    """Read JSON strictly: no key twice, no NaN, no nesting without end."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON as it is written here: {_short(error)}.") from error


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _short(error: Exception) -> str:
    return str(error)[:200]


def to_json(value: Any, what: str) -> bytes:
    """Write JSON in ASCII, whatever the strings hold."""
    data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
    if len(data) > JSON_BYTES:
        raise CheckpointError(
            f"{what} takes {len(data)} bytes, and {JSON_BYTES} is the most. Save fewer, larger tensors."
        )
    return data


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> Facts:
    """Write a new file through to the disk, and tell its size and digest, taken from what was handed over."""
    digest, size_bytes = hashlib.sha256(), 0
    fd = os.open(path, _CREATE, 0o666)
    try:
        for chunk in chunks:
            whole = memoryview(chunk)
            for begin in range(0, len(whole), _CHUNK_BYTES):
                piece = whole[begin : begin + _CHUNK_BYTES]
                digest.update(piece)
                _write_all(fd, piece)
            size_bytes += len(whole)
        os.fsync(fd)
    finally:
        os.close(fd)
    return Facts(size_bytes, digest.hexdigest())


def _write_all(fd: int, piece: memoryview) -> None:
    while len(piece):
        piece = piece[os.write(fd, piece) :]


def sync_folder(path: Path) -> None:
    """Have the names in a folder reach the disk, where the system can."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
