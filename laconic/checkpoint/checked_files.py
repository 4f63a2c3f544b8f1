"""Read the files of a checkpoint, which are untrusted: a name may be a link or a pipe, a file truncated or hostile.

Defects raise `CheckpointError` or `OSError`.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from laconic.checkpoint.records import CheckpointError

MAX_JSON_BYTES = 32 << 20
"""The limit for JSON in a checkpoint, on writing and on reading."""


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of a file, as the manifest lists them."""

    size_bytes: int
    sha256: str


def _regular_size(path: Path) -> int:
    if not os.path.lexists(path):
        raise CheckpointError(f"{path.name} is missing.")
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path.name} is not a regular file. Links, pipes and devices are not opened.")
    return found.st_size


def _open_regular(path: Path) -> BufferedReader:
    _regular_size(path)
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def file_record(path: Path) -> FileRecord:
    """Read a file for its size and digest."""
    with _open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(file.tell(), digest)


def check_size(path: Path, expected: FileRecord) -> None:
    """Compare the size of a file with its record, without reading it."""
    size_bytes = _regular_size(path)
    if size_bytes != expected.size_bytes:
        raise CheckpointError(
            f"{path.name} has {size_bytes} bytes, but the manifest lists {expected.size_bytes}: "
            "it was truncated, or it grew."
        )


def check_file(path: Path, expected: FileRecord) -> None:
    """Compare the size and the digest of a file with its record."""
    check_size(path, expected)
    found = file_record(path)
    if found != expected:
        raise CheckpointError(
            f"{path.name} has the SHA-256 {found.sha256}, but the manifest lists {expected.sha256}: "
            "its bytes are not those that were saved."
        )


def read_small(path: Path, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Read a file of at most `limit_bytes`."""
    with _open_regular(path) as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise CheckpointError(f"{path.name} has more than {limit_bytes} bytes, which is the limit for such a file.")
    return data


def parse_json(data: bytes | str, what: str) -> Any:
    """Parse JSON that may be hostile."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {str(error)[:200]}.") from error
