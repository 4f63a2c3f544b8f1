"""The manifest of a checkpoint: the step, the number of workers, and the size and SHA-256 of every file.

`manifest.sha256` holds the digest of the manifest itself, in the format of `sha256sum`. It is not a signature: who can
rewrite the files can also rewrite their digests.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from laconic.checkpoint.atomic_write import write_synced
from laconic.checkpoint.checked_files import FileRecord, parse_json, read_small
from laconic.checkpoint.records import CheckpointError
from laconic.checkpoint.workers import is_whole

MANIFEST, SEAL = "manifest.json", "manifest.sha256"
FORMAT, VERSION = "laconic checkpoint", 2


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
    return Manifest(step, workers, {name: parse_record(record, MANIFEST) for name, record in files.items()})


def parse_record(value: Any, source: str) -> FileRecord:
    """Check a file's size and digest that were read from JSON."""
    match value:
        case {"size_bytes": int(size_bytes), "sha256": str(sha256)} if len(value) == 2:
            if is_whole(size_bytes, 0) and re.fullmatch("[0-9a-f]{64}", sha256):
                return FileRecord(size_bytes, sha256)
    raise CheckpointError(f"{source} has a file without a valid size and SHA-256: {str(value)[:120]}.")


def _require(ok: bool, problem: str) -> None:
    if not ok:
        raise CheckpointError(f"{MANIFEST} {problem}.")
