"""The manifest of a checkpoint: the step, the number of workers, and the size and SHA-256 of every file.

`manifest.sha256` holds the digest of the manifest itself, in the format of `sha256sum`. It is not a signature: who can
rewrite the files can also rewrite their digests. So all files are untrusted: they may be damaged, hostile, or links.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from laconic.checkpoint.atomic_write import write_synced
from laconic.checkpoint.records import CheckpointError
from laconic.checkpoint.workers import is_whole

MANIFEST, SEAL = "manifest.json", "manifest.sha256"
FORMAT, VERSION = "laconic checkpoint", 2
MAX_JSON_BYTES = 64 << 20
"""The limit for JSON in a checkpoint, on writing and on reading."""


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of a file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    step: int
    workers: int
    files: Mapping[str, FileRecord]


def worker_file(worker: int) -> str:
    """Return the name of a worker's file.

    >>> worker_file(3)
    'worker-00003.safetensors'
    """
    return f"worker-{worker:05d}.safetensors"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and its digest."""
    data = json.dumps({"format": FORMAT, "version": VERSION, **asdict(manifest)}).encode()
    write_synced(folder / MANIFEST, data)
    write_synced(folder / SEAL, _seal(data))


def _seal(data: bytes) -> bytes:
    return f"{hashlib.sha256(data).hexdigest()}  {MANIFEST}\n".encode()


def read_manifest(folder: Path, step: int) -> Manifest:
    """Read and check the manifest in the folder of a step."""
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointError(f"{folder.name} is not a folder. A checkpoint is a folder, and not a link to one.")
    data, seal = read_small(folder / MANIFEST), read_small(folder / SEAL, limit_bytes=1024)
    if seal != _seal(data):
        raise CheckpointError(
            f"{MANIFEST} has the SHA-256 {_seal(data)[:64].decode()}, but {SEAL} lists "
            f"{seal[:64].decode('ascii', 'backslashreplace')}: one of the two is damaged."
        )
    manifest = _parse(parse_json(data, MANIFEST))
    _require(manifest.step == step, f"belongs to step {manifest.step}, but is in the folder of step {step}")
    return manifest


def _parse(value: Any) -> Manifest:
    _require(isinstance(value, dict) and value.get("format") == FORMAT, f"is not that of a {FORMAT}")
    _require(
        value.get("version") == VERSION,
        f"has format version {str(value.get('version'))[:40]}, and this laconic reads version {VERSION} only: "
        "load it with the laconic that saved it",
    )
    _require(set(value) == {"format", "version", "step", "workers", "files"}, "has missing or unknown fields")
    step, workers, files = value["step"], value["workers"], value["files"]
    _require(is_whole(step, 0) and is_whole(workers, 1), "has a step or a number of workers that is not a whole number")
    # The names are fixed, so none can lead out of the folder.
    named = isinstance(files, dict) and len(files) == workers and set(files) == set(map(worker_file, range(workers)))
    _require(named, f"does not list exactly one file for each of {workers} workers")
    return Manifest(step, workers, {name: _parse_record(record) for name, record in files.items()})


def read_record(path: Path) -> FileRecord:
    """Read the record of a file that a worker has written."""
    return _parse_record(parse_json(read_small(path), path.name))


def _parse_record(value: Any) -> FileRecord:
    match value:
        case {"size_bytes": int(size_bytes), "sha256": str(sha256)} if len(value) == 2:
            if is_whole(size_bytes, 0) and re.fullmatch("[0-9a-f]{64}", sha256):
                return FileRecord(size_bytes, sha256)
    raise CheckpointError(f"a file is listed without a valid size and SHA-256: {str(value)[:120]}.")


def _require(ok: bool, problem: str) -> None:
    if not ok:
        raise CheckpointError(f"{MANIFEST} {problem}.")


def check_file(path: Path, expected: FileRecord, *, size_only: bool = False) -> None:
    """Compare a file with its record. A file of another size is not read."""
    size_bytes = _regular_size(path)
    if size_bytes != expected.size_bytes:
        raise CheckpointError(
            f"{path.name} has {size_bytes} bytes, but the manifest lists {expected.size_bytes}: "
            "it was truncated, or it grew."
        )
    found = expected if size_only else file_record(path)
    if found != expected:
        raise CheckpointError(
            f"{path.name} has the SHA-256 {found.sha256}, but the manifest lists {expected.sha256}: "
            "its bytes are not those that were saved."
        )


def file_record(path: Path) -> FileRecord:
    """Read a file for its size and digest."""
    with _open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(file.tell(), digest)


def read_small(path: Path, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Read a file of at most `limit_bytes`."""
    with _open_regular(path) as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise CheckpointError(f"{path.name} has more than {limit_bytes} bytes, which is the limit for such a file.")
    return data


def _open_regular(path: Path) -> BufferedReader:
    _regular_size(path)
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def _regular_size(path: Path) -> int:
    if not os.path.lexists(path):
        raise CheckpointError(f"{path.name} is missing.")
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path.name} is not a regular file. Links, pipes and devices are not opened.")
    return found.st_size


def parse_json(data: bytes | str, what: str) -> Any:
    """Parse JSON that may be hostile."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {str(error)[:200]}.") from error
