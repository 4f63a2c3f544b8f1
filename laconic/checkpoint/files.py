"""The folder of a run, the folder of each checkpoint in it, and the files of one.

    step-00000042                  a checkpoint: complete, or damaged since
        worker-00000.safetensors       the state of each worker
        manifest.json                  step, number of workers, size and SHA-256 of each file
    .step-00000043.1f83d9ab.tmp    being written
    .step-00000041.5be0cd19.gone   being removed
    .step-00000042.old             replaced by another checkpoint of that step; it counts until that one is in place

A name without a dot appears and disappears in one rename. The next save removes what a killed process left. The random
part keeps a worker that an earlier run left behind from writing to the folder of a new run.

A checkpoint may come from somebody else. File names are fixed, so none leads out of the folder; links are not opened;
and the safetensors package checks a header before it allocates, so that a file takes no more memory than its size, and
its largest tensor once more.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from laconic.checkpoint.state import dense, dtype_name, unflatten
from laconic.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT, VERSION = "laconic checkpoint", 3
MAX_MANIFEST_BYTES = 64 << 20
_NAME = re.compile(
    r"(?P<dot>\.?)step-(?P<step>\d{8}|[1-9]\d{8,18})(?P<kind>|\.old|\.[0-9a-f]{8}\.(tmp|gone))", re.ASCII
)

# The folder of a run


def final_path(folder: Path, step: int) -> Path:
    """Return the path of a complete checkpoint."""
    return folder / f"step-{step:08d}"


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
    path = folder / f".step-{step:08d}.{secrets.token_hex(4)}.tmp"
    path.mkdir()
    return path


def put_in_place(temporary: Path, step: int) -> None:
    """Rename a complete checkpoint to its final name, replacing one of the same step."""
    folder = temporary.parent
    final, old = final_path(folder, step), folder / f".step-{step:08d}.old"
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


# The files of a checkpoint


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of a file."""

    size_bytes: int
    sha256: str


def worker_file(worker: int) -> str:
    """Return the name of a worker's file."""
    return f"worker-{worker:05d}.safetensors"


def write_state(path: Path, skeleton: Any, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write what `flatten` made of a state to a safetensors file, with the skeleton as metadata, and fsync it.

    Return its record. The file appears when it is whole.
    """
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
    state, problem = None, None
    with ThreadPoolExecutor(1) as pool:
        digest = None if expected is None else pool.submit(_sha256, path)
        try:  # the package checks the header; nothing is mapped, because the file could change under the tensors
            with safe_open(path, "pt", backend="pread") as file:
                tensors = {name: file.get_tensor(name).clone() for name in file.offset_keys()}  # clones can be resized
                state = unflatten(json.loads((file.metadata() or {})["state"]), tensors)
        except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError, MemoryError) as error:
            problem = error
    if expected is not None and digest is not None:
        _check_digest(path, digest.result(), expected)  # of a damaged file, that is what the error says
    if problem is not None:
        what = f"{type(problem).__name__}: {str(problem)[:300]}"
        raise CheckpointError(f"{path.name} cannot be read: {what}.") from problem
    return state


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


def manifest(step: int, records: Sequence[FileRecord]) -> bytes:
    """Return the manifest, made of the record of each worker's file."""
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
    # It must be what `save` would write. So a flipped bit is found, and file names are those of the workers.
    if not records or data != manifest(step, records):
        raise CheckpointError(
            f"{MANIFEST} is not that of a {FORMAT} of version {VERSION} and step {step} with one file for each worker: "
            f"{data[:200]!r}. It is damaged, or another version of laconic saved it, which can load it."
        )
    return records
