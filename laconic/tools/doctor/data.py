"""The training data (`--data`): present here, and the same on all workers."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from laconic.errors import names, outliers
from laconic.tools.doctor.finding import Finding

BLOCK_BYTES = 4096
SAMPLED_FILES = 256


def summarize(path: Path) -> dict[str, str]:
    """Count the files and bytes of a file or folder, and digest all names and sizes, and blocks of up to 256 files."""
    walked = os.walk(path, followlinks=True, onerror=_fail) if path.is_dir() else [("", [], [str(path)])]
    files = sorted(Path(folder, name) for folder, _, found in walked for name in found)
    sizes = [file.stat().st_size for file in files]
    listed, sampled = hashlib.sha256(), hashlib.sha256()
    for file, size in zip(files, sizes, strict=True):
        listed.update(f"{file.relative_to(path).as_posix()}\0{size}\0".encode())
    for file in files[:: max(1, -(-len(files) // SAMPLED_FILES))]:
        sampled.update(_blocks(file))
    return {
        "number of files": f"{len(files):,}",
        "total size": f"{sum(sizes):,} bytes",
        "file names and sizes": listed.hexdigest()[:16],
        "sampled bytes": sampled.hexdigest()[:16],
    }


def _fail(error: OSError) -> None:
    raise error


def _blocks(path: Path) -> bytes:
    """Read the first, the middle and the last block of a file."""
    blocks = b""
    with path.open("rb") as file:
        last = max(0, file.seek(0, os.SEEK_END) - BLOCK_BYTES)
        for start in (0, last // 2, last):
            file.seek(start)
            blocks += file.read(BLOCK_BYTES)
    return blocks


def check_data(path: Path) -> tuple[Finding, dict[str, str]]:
    """Check that there are files at the path; return their summary, too."""
    why = "This worker has nothing to train on."
    try:
        found = summarize(path)
    except OSError as error:
        shown = f"--data {path}: {error.strerror or error}: {error.filename or path}"
        return Finding("data", "problem", shown, why, "Give a file or folder that this host can read."), {}
    if found["number of files"] == "0":
        way_out = "Mount the disk on this host, or correct the path."
        return Finding("data", "problem", f"--data {path}: the folder has no files", why, way_out), found
    return Finding("data", "ok", f"{path}: {found['number of files']} files, {found['total size']}"), found


def compare_data(by_worker: Sequence[Mapping[str, str]]) -> Finding:
    """Check that the summaries of all workers are the same, and name what differs."""
    for part in dict.fromkeys(part for summary in by_worker for part in summary):
        _, odd = outliers([summary.get(part) for summary in by_worker])
        if odd:
            found = f"{names(odd)}: not the same {part} as on the other workers"
            why = "Samplers that split one data set between workers then skip or repeat samples."
            way_out = "Copy the data again, or mount the same disk. Ignore this if each worker has its own part."
            return Finding("same data", "problem", found, why, way_out)
    return Finding("same data", "ok", f"the same on all {len(by_worker)} workers: names, sizes and sampled bytes")
