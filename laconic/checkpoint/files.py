"""The files of one checkpoint: a safetensors file for each worker, the manifest, and the manifest's digest.

The manifest lists the step, the number of workers, and the size and SHA-256 of each worker's file. It is not a
signature: who can rewrite the files can also rewrite their digests. So every file may be damaged, hostile, or a link.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from laconic.checkpoint.tensor_file import read_tensors, write_tensors
from laconic.checkpoint.tree import CheckpointError, unflatten

MANIFEST, SEAL = "manifest.json", "manifest.sha256"
FORMAT, VERSION = "laconic checkpoint", 2
MAX_JSON_BYTES = 64 << 20


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of a file."""

    size_bytes: int
    sha256: str


def worker_file(worker: int) -> str:
    """Return the name of a worker's file."""
    return f"worker-{worker:05d}.safetensors"


def write_synced(path: Path, data: bytes) -> None:
    """Write a file that does not exist yet, and fsync it."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_worker_file(path: Path, skeleton: Any, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write what `tree.flatten` returned, the skeleton as metadata; fsync the file and return its record."""
    text = json.dumps(skeleton, allow_nan=False, separators=(",", ":"))
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"the state has {len(text)} bytes of JSON, above {MAX_JSON_BYTES}. Save lists as tensors."
        )
    return FileRecord(*write_tensors(path, {"state": text}, tensors))


def read_worker_file(path: Path, expected: FileRecord | None = None, *, discard_data: bool = False) -> Any:
    """Check a worker's file, by its record if there is one, and return its state.

    With `discard_data`, tensors are on the meta device.
    """
    listed = None if expected is None else expected.sha256
    with _open_regular(path) as file:
        if expected is not None:
            _check_size(path, file, expected)
        try:
            metadata, tensors, digest = read_tensors(path, file, discard_data=discard_data)
            if listed in (None, digest):
                return _state(metadata, tensors)
        except (SafetensorError, RuntimeError, TypeError, OverflowError, MemoryError) as error:  # impossible shapes
            if expected is not None:
                check_file(path, expected)  # of a damaged file, that is what the error says
            raise CheckpointError(f"{path.name} cannot be read: {str(error)[:300]}") from error
    raise _mismatch(path.name, f"the SHA-256 {digest}", MANIFEST, listed)


def _state(metadata: Mapping[str, str], tensors: dict[str, Tensor]) -> Any:
    """Build the state from the skeleton in the metadata. It must use each tensor exactly once."""

    def take(name: str) -> Tensor:
        if name not in tensors:
            raise CheckpointError(f"it has no tensor {name!r}, or uses it twice.")
        return tensors.pop(name)

    state = unflatten(_parse_json(metadata.get("state", ""), "its state"), take)
    if tensors:
        raise CheckpointError(f"it has tensors that its state does not use: {sorted(tensors)[:3]}.")
    return state


def write_manifest(folder: Path, step: int, records: Sequence[FileRecord]) -> None:
    """Write the manifest, from the record of each worker's file, and its digest, which `sha256sum -c` can check."""
    data = _manifest(step, records)
    write_synced(folder / MANIFEST, data)
    write_synced(folder / SEAL, _seal(data).encode())


def _manifest(step: int, records: Sequence[FileRecord]) -> bytes:
    files = {worker_file(worker): asdict(record) for worker, record in enumerate(records)}
    head = {"format": FORMAT, "version": VERSION, "step": step, "workers": len(records)}
    return json.dumps({**head, "files": files}).encode()


def _seal(data: bytes) -> str:
    return f"{hashlib.sha256(data).hexdigest()}  {MANIFEST}\n"


def read_manifest(folder: Path, step: int) -> list[FileRecord]:
    """Check the manifest in the folder of a step, and return the record of each worker's file."""
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointError(f"{folder.name} is not a folder. A checkpoint is a folder, and not a link to one.")
    data, seal = _read_small(folder / MANIFEST), _read_small(folder / SEAL, limit_bytes=1024)
    if seal != _seal(data).encode():
        raise _mismatch(
            MANIFEST, f"the SHA-256 {_seal(data)[:64]}", SEAL, seal[:64].decode("ascii", "backslashreplace")
        )
    value, records = _parse_json(data, MANIFEST), list[FileRecord]()
    with suppress(TypeError, KeyError, AttributeError):
        records = [FileRecord(**record) for record in value["files"].values()]
    # It must be what `write_manifest` would write. So file names are fixed, and none can lead out of the folder.
    if not records or data != _manifest(step, records):
        raise CheckpointError(
            f"{MANIFEST} is not that of a {FORMAT} of version {VERSION} and step {step} with one file for each worker: "
            f"{str(value)[:200]}. Load another version with the laconic that saved it."
        )
    return records


def _mismatch(name: str, found: str, source: str, listed: object) -> CheckpointError:
    text = str(listed)[:80]
    return CheckpointError(f"{name} has {found}, but {source} lists {text}: its bytes are not those that were saved.")


def check_file(path: Path, expected: FileRecord, *, size_only: bool = False) -> None:
    """Compare a file with its record. A file of another size is not read."""
    with _open_regular(path) as file:
        _check_size(path, file, expected)
        if not size_only and (digest := hashlib.file_digest(file, "sha256").hexdigest()) != expected.sha256:
            raise _mismatch(path.name, f"the SHA-256 {digest}", MANIFEST, expected.sha256)


def _check_size(path: Path, file: BufferedReader, expected: FileRecord) -> None:
    size_bytes = os.fstat(file.fileno()).st_size
    if size_bytes != expected.size_bytes:
        raise _mismatch(path.name, f"{size_bytes} bytes", MANIFEST, expected.size_bytes)


def _read_small(path: Path, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
    with _open_regular(path) as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise CheckpointError(f"{path.name} has more than {limit_bytes} bytes, which is the limit for such a file.")
    return data


def _open_regular(path: Path) -> BufferedReader:
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise CheckpointError(f"{path.name} is not a regular file. Links, pipes and devices are not opened.")
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def _parse_json(data: bytes | str, what: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {str(error)[:200]}.") from error
