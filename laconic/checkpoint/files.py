"""The files of one checkpoint: a safetensors file for each worker, and a manifest with the size and SHA-256 of each.

A checkpoint may come from somebody else. File names are fixed, so none leads out of the folder; links are not opened;
and the safetensors package checks a header before it allocates, so that a file takes no more memory than its size.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from laconic.atomic_write import write_atomically
from laconic.checkpoint.state import NATIVE_DTYPES, dense, dtype_name, flatten, unflatten
from laconic.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT, VERSION = "laconic checkpoint", 3
MAX_MANIFEST_BYTES = 64 << 20
BLOCK_BYTES = 4 << 20
_NAMES = "F64 F32 F16 BF16 I64 I32 I16 I8 U64 U32 U16 U8 BOOL C64 F8_E4M3 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ F8_E8M0"
DTYPES = dict(zip(_NAMES.split(), NATIVE_DTYPES.values(), strict=True))
"""Dtypes by the names that a safetensors file has for them."""


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of a file."""

    size_bytes: int
    sha256: str


def worker_file(worker: int) -> str:
    """Return the name of a worker's file."""
    return f"worker-{worker:05d}.safetensors"


def write_state(path: Path, state: Any) -> FileRecord:
    """Write a state to a safetensors file, fsync it, and return its record. The file appears when it is whole."""
    return write_flat(path, *flatten(state))


def write_flat(path: Path, skeleton: Any, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write what `flatten` returned, with the skeleton as metadata, as `write_state` does."""
    text = json.dumps(skeleton, allow_nan=False, separators=(",", ":"))
    held = {name: dense(t) for name, t in tensors.items()}  # alive while the file is written from their memory
    specs = {
        name: TensorSpec(dtype=dtype_name(t.dtype), shape=list(t.shape), data_ptr=t.data_ptr(), data_len=t.nbytes)
        for name, t in held.items()
    }
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        serialize_file(specs, temporary, {"state": text})
    except SafetensorError as error:
        if "header" in str(error):  # above the package's limit of 100 MB
            raise CheckpointError(
                f"the names, shapes and other values of the state are too long for a safetensors file: {error}. Join "
                "small tensors, or save lists as tensors."
            ) from error
        raise
    temporary.chmod(path.parent.stat().st_mode & 0o666)  # the package makes files that only their owner can read
    with temporary.open("rb") as file, ThreadPoolExecutor(1) as pool:
        synced = pool.submit(os.fsync, file.fileno())  # the disk is busy while this thread computes
        record = FileRecord(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())
        synced.result()
    os.rename(temporary, path)
    return record


def read_state(path: Path, expected: FileRecord | None = None) -> Any:
    """Read a state that `write_state` wrote, and compare the file with its record if there is one."""
    _check_size(path, expected)
    try:
        state, digest = _read(path)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError, MemoryError) as error:
        if expected is not None:
            _check_digest(path, _sha256(path), expected)  # of a damaged file, that is what the error says
        raise CheckpointError(f"{path.name} cannot be read: {type(error).__name__}: {str(error)[:300]}.") from error
    if expected is not None:
        _check_digest(path, digest, expected)
    return state


def _read(path: Path) -> tuple[Any, str]:
    """Return the state and the SHA-256 of a file, read once, each tensor into memory of its own."""
    # 1. The package checks the header, and that the tensors fill the rest of the file without gaps.
    with safe_open(path, "pt", backend="pread") as opened:
        stored = {name: opened.get_slice(name) for name in opened.offset_keys()}
        tensors = {n: torch.empty(each.get_shape(), dtype=DTYPES[each.get_dtype()]) for n, each in stored.items()}
        skeleton = json.loads((opened.metadata() or {})["state"])
    # 2. One thread reads, and another computes the digest of what was read. Nothing is mapped: the file could change.
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        header_bytes = os.fstat(file.fileno()).st_size - sum(t.nbytes for t in tensors.values())
        header = torch.empty(header_bytes, dtype=torch.uint8)
        for t in (header, *tensors.values()):
            memory = (ctypes.c_char * t.nbytes).from_address(t.data_ptr())  # after t.numpy(), t could not be resized
            left = memoryview(memory).cast("B")
            while left:
                if not (count := file.readinto(left[:BLOCK_BYTES])):
                    raise ValueError("it became shorter while it was read")
                pool.submit(digest.update, left[:count])
                left = left[count:]
    return unflatten(skeleton, tensors), digest.hexdigest()


def check_file(path: Path, expected: FileRecord, *, size_only: bool = False) -> None:
    """Compare a file with its record. A file of another size is not read."""
    _check_size(path, expected)
    if not size_only:
        _check_digest(path, _sha256(path), expected)


def _check_size(path: Path, expected: FileRecord | None) -> None:
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path.name} is not a regular file. Links, pipes and devices are not opened.")
    if expected is not None and status.st_size != expected.size_bytes:
        raise _mismatch(path, f"{status.st_size} bytes", expected.size_bytes)


def _check_digest(path: Path, digest: str, expected: FileRecord) -> None:
    if digest != expected.sha256:
        raise _mismatch(path, f"the SHA-256 {digest}", expected.sha256)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mismatch(path: Path, found: str, listed: object) -> CheckpointError:
    return CheckpointError(
        f"{path.name} has {found}, but {MANIFEST} lists {str(listed)[:80]}: its bytes are not those that were saved."
    )


def write_manifest(folder: Path, step: int, records: Sequence[FileRecord]) -> None:
    """Write the manifest, from the record of each worker's file."""
    write_atomically(folder / MANIFEST, _manifest(step, records))


def _manifest(step: int, records: Sequence[FileRecord]) -> bytes:
    files = {worker_file(worker): asdict(record) for worker, record in enumerate(records)}
    head = {"format": FORMAT, "version": VERSION, "step": step, "workers": len(records)}
    return json.dumps({**head, "files": files}).encode()


def read_manifest(folder: Path, step: int) -> list[FileRecord]:
    """Check the manifest in the folder of a step, and return the record of each worker's file."""
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointError(f"{folder.name} is not a folder. A checkpoint is a folder, and not a link to one.")
    path, records = folder / MANIFEST, list[FileRecord]()
    _check_size(path, None)
    with path.open("rb") as file:
        data = file.read(MAX_MANIFEST_BYTES)
    with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        records = [FileRecord(**record) for record in json.loads(data)["files"].values()]
    # It must be what `write_manifest` would write. So a flipped bit is found, and file names are those of the workers.
    if not records or data != _manifest(step, records):
        raise CheckpointError(
            f"{MANIFEST} is not that of a {FORMAT} of version {VERSION} and step {step} with one file for each worker: "
            f"{data[:200]!r}. It is damaged, or another version of laconic saved it, which can load it."
        )
    return records
