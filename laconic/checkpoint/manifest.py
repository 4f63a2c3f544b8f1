"""The manifest of a generation: who saved it, and the size and SHA-256 of every file.

`manifest.sha256` holds the manifest's own digest, as `sha256sum` writes it. A flipped bit anywhere is found. It is no
signature: who can rewrite files can rewrite their digests.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from laconic.checkpoint.files import Facts, parse_json, read_bounded, require_folder, to_json, write_file
from laconic.checkpoint.generation import CheckpointError

MANIFEST, SEAL = "manifest.json", "manifest.sha256"
FORMAT, VERSION = "laconic checkpoint", 1
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """What a generation is made of."""

    step: int
    workers: int
    files: Mapping[str, Facts]


def files_of(worker: int) -> tuple[str, str]:
    """Name a worker's two files: the tree of its state, and its tensors.

    >>> files_of(3)
    ('worker-00003.json', 'worker-00003.safetensors')
    """
    return f"worker-{worker:05d}.json", f"worker-{worker:05d}.safetensors"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put the manifest and its digest into a folder."""
    value = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "workers": manifest.workers,
        "files": facts_to_json(manifest.files),
    }
    facts = write_file(folder / MANIFEST, [to_json(value, "the manifest")])
    write_file(folder / SEAL, [f"{facts.sha256}  {MANIFEST}\n".encode()])


def read_manifest(folder: Path, step: int) -> Manifest:
    """Read the manifest of a generation, and believe none of it before it is checked."""
    require_folder(folder)
    data = read_bounded(folder / MANIFEST)
    found, sealed = hashlib.sha256(data).hexdigest(), read_bounded(folder / SEAL, limit_bytes=1024)
    if sealed != f"{found}  {MANIFEST}\n".encode():
        expected = sealed[:64].decode("ascii", "backslashreplace")
        raise CheckpointError(
            f"{MANIFEST} has the SHA-256 {found}, and {SEAL} says {expected}: one of the two is damaged."
        )
    manifest = _checked(parse_json(data, MANIFEST))
    if manifest.step != step:
        _refuse(f"is that of step {manifest.step}, and lies where step {step} should")
    return manifest


def _checked(value: Any) -> Manifest:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        _refuse(f"is not that of a {FORMAT}")
    if value.get("version") != VERSION:
        _refuse(f"is of version {str(value.get('version'))[:40]}; this laconic reads version {VERSION}")
    if set(value) != {"format", "version", "step", "workers", "files"}:
        _refuse(f"has the fields {str(sorted(value))[:200]}, which are not those of version {VERSION}")
    step, workers, files = value["step"], value["workers"], value["files"]
    if type(step) is not int or not 0 <= step < 2**63 or type(workers) is not int or workers < 1:
        _refuse("has a step or a number of workers that is not a whole number")
    if not isinstance(files, dict) or len(files) != 2 * workers:
        _refuse(f"does not list the {2 * workers} files of {workers} workers")
    # The names are fixed, so none can lead out of the folder.
    strange = sorted(files.keys() - {name for worker in range(workers) for name in files_of(worker)})
    if strange:
        _refuse(f"lists {strange[0][:80]!r}, which is not the name of a worker's file")
    return Manifest(step, workers, facts_from_json(files, MANIFEST))


def facts_to_json(files: Mapping[str, Facts]) -> dict[str, Any]:
    """Write sizes and digests as JSON values."""
    return {name: {"bytes": facts.size_bytes, "sha256": facts.sha256} for name, facts in files.items()}


def facts_from_json(files: Mapping[str, Any], source: str) -> dict[str, Facts]:
    """Read sizes and digests from JSON values."""
    return {name: _facts(name, value, source) for name, value in files.items()}


def _facts(name: str, value: Any, source: str) -> Facts:
    if not isinstance(value, dict) or set(value) != {"bytes", "sha256"}:
        raise CheckpointError(f"{source} says of {name[:80]!r} something other than bytes and sha256.")
    size_bytes, sha256 = value["bytes"], value["sha256"]
    if type(size_bytes) is not int or not 0 <= size_bytes < 2**63:
        raise CheckpointError(f"{source} gives {name[:80]!r} a size that is not a whole number.")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise CheckpointError(f"{source} gives {name[:80]!r} a SHA-256 that is not 64 hexadecimal digits.")
    return Facts(size_bytes, sha256)


def _refuse(finding: str) -> NoReturn:
    raise CheckpointError(f"{MANIFEST} {finding}.")
