"""Whether all workers see the same data: names, sizes, and the bytes of a sample of blocks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from laconic.checks.outliers import names, outliers
from laconic.doctor.finding import Finding, ok, problem

BLOCK = 4096
SAMPLED_FILES = 256
PARTS = ("number of files", "names", "sizes", "sampled bytes")


@dataclass(frozen=True)
class Data:
    """What is compared between workers. `error` is set where the path could not be read."""

    files: int
    size: int
    names: str
    sizes: str
    blocks: str
    error: str = ""


def look_at(path: Path) -> Data:
    """Digests of a file or of a folder: of all names and sizes, and of three blocks of up to 256 files."""
    try:
        files = sorted(_files(path))
        sizes = [os.stat(path / name if name else path).st_size for name in files]
        every = max(1, -(-len(files) // SAMPLED_FILES))
        blocks = (block for name in files[::every] for block in _blocks(path / name if name else path))
        return Data(
            len(files), sum(sizes), _digest(f.encode() for f in files), _digest(map(_bytes, sizes)), _digest(blocks)
        )
    except OSError as error:
        return Data(0, 0, "", "", "", f"{error.strerror or error}: {error.filename or path}")


def _files(path: Path) -> Iterator[str]:
    if not path.is_dir():
        os.stat(path)
        yield ""
        return
    for folder, _, found in os.walk(path, followlinks=True, onerror=_fail):
        for name in found:
            yield Path(folder, name).relative_to(path).as_posix()


def _fail(error: OSError) -> None:
    raise error


def _blocks(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        for start in sorted({0, max(0, size // 2 - BLOCK // 2), max(0, size - BLOCK)}):
            file.seek(start)
            yield file.read(BLOCK)


def _digest(parts: Iterator[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()[:16]


def _bytes(number: int) -> bytes:
    return number.to_bytes(8, "little")


def check_data(path: Path, here: Data) -> Finding:
    """Whether there is anything at the path."""
    if here.error:
        return problem("data", f"--data {path}: {here.error}", "Give a file or folder that this host can read.")
    if here.files == 0:
        return problem("data", f"--data {path}: the folder holds no files", "Is the disk mounted on this host?")
    shown = (
        f"{path}: {here.files:,} files, {here.size:,} bytes, digest {here.names[:4]}{here.sizes[:4]}{here.blocks[:4]}"
    )
    return ok("data", shown)


def compare_data(said: Sequence[Mapping[str, object]]) -> Finding:
    """Whether the data of all workers are the same, and if not, in what."""
    for part, what in zip(("files", "names", "sizes", "blocks"), PARTS, strict=True):
        each = [str(one.get(part)) for one in said]
        _, odd = outliers(each)
        if odd:
            shown = f"{names(odd)} sees other data than the rest: the {what} differ"
            way_out = "Copy the data again, or mount the same disk, unless each worker is meant to have its own part."
            return problem("same data", shown, way_out)
    return ok("same data", f"alike on all {len(said)} workers: names, sizes and a sample of their bytes")
