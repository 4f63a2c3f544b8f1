"""Make a hostile checkpoint whose digests fit, and check that it is refused."""

from __future__ import annotations

import hashlib
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laconic import checkpoint
from laconic.checkpoint import CheckpointError

FILE = "worker-00000.safetensors"


def reseal(place: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    """Make the manifest fit the files, as their author would."""
    manifest = json.loads((place / "manifest.json").read_text())
    for name in manifest["files"]:
        data = (place / name).read_bytes()
        manifest["files"][name] = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(manifest)
    seal(place, json.dumps(manifest).encode())


def seal(place: Path, manifest: bytes) -> None:
    (place / "manifest.json").write_bytes(manifest)
    (place / "manifest.sha256").write_text(f"{hashlib.sha256(manifest).hexdigest()}  manifest.json\n")


def refused(place: Path, text: str) -> None:
    """Check that each function refuses the checkpoint and takes the older one, within 1 GB of new memory."""
    folder, limits = place.parent, resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 30), limits[1]))
    try:
        with pytest.raises(CheckpointError, match=text):
            checkpoint.load(folder, step=2)
        assert [each.good for each in checkpoint.verify(folder)] == [True, False]
        assert len(checkpoint.checkpoints(folder)) == 2
        assert checkpoint.load(folder).state["n"] == 1
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert not list(folder.parent.rglob("canary*"))
