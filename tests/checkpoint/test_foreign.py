"""A checkpoint from somebody else: nothing in it runs, nothing outside it is read, and little memory is used.

Whoever can write the files can also write digests that fit, as these tests do.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic import checkpoint
from laconic.checkpoint import CheckpointError

FILE = "worker-00000.safetensors"


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    """The folder of a good checkpoint, beside an older one that can be used instead."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoints"
    checkpoint.save(folder, {"w": torch.zeros(4), "n": 1}, step=1)
    checkpoint.save(folder, {"w": torch.ones(4), "n": 2}, step=2)
    return folder / "step-00000002"


def reseal(place: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    """Make the manifest fit the files, as their author would."""
    manifest = json.loads((place / "manifest.json").read_text())
    for name in manifest["files"]:
        data = (place / name).read_bytes()
        manifest["files"][name] = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(manifest)
    (place / "manifest.json").write_text(json.dumps(manifest))


def refused(place: Path, text: str) -> None:
    """Check that the checkpoint is refused and the older one taken, within 1 GB of new memory."""
    folder, limits = place.parent, resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 30), limits[1]))
    try:
        with pytest.raises(CheckpointError, match=text):
            checkpoint.load(folder, step=2)
        assert checkpoint.load(folder).state["n"] == 1
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert not list(folder.parent.rglob("canary*"))


class Bomb:
    def __reduce__(self):
        return os.system, ("touch canary",)


FOREIGN = {
    "pickle": pickle.dumps(Bomb()),
    "python": b"__import__('os').system('touch canary')",
    "nothing": b"",
    "zeros": bytes(100),
    "ones": b"\xff" * 100,
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_other_files_under_our_names(place, data):
    (place / FILE).write_bytes(data)
    reseal(place)
    refused(place, f"{FILE} cannot be read: SafetensorError")
    (place / "manifest.json").write_bytes(data)
    refused(place, "manifest.json is not that of a laconic checkpoint")


def sparse(path: Path, size_bytes: int) -> None:
    path.unlink()
    path.touch()
    os.truncate(path, size_bytes)


@pytest.mark.parametrize(
    ("name", "text"), [(FILE, f"{FILE} has 1099511627776 bytes, but manifest"), ("manifest.json", "is not that of")]
)
def test_a_huge_file_is_not_read(place, name, text):
    sparse(place / name, 1 << 40)
    refused(place, text)


FORM = "is not that of a laconic checkpoint of version 3 and step 2 with one file for each worker"


def renamed(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda m: m["files"].update({name: m["files"].pop(FILE)})


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "path out": (renamed("../worker-00000.safetensors"), FORM),
    "absolute": (renamed("/etc/passwd"), FORM),
    "no files": (lambda m: m.update(files={}), FORM),
    "files a list": (lambda m: m.update(files=[FILE]), FORM),
    "many workers": (lambda m: m.update(workers=10**18), FORM),
    "another step": (lambda m: m.update(step=3), FORM),
    "NaN steps": (lambda m: m.update(step=math.nan), FORM),
    "old version": (lambda m: m.update(version=2), "or another version of laconic saved it, which can load it"),
    "more fields": (lambda m: m.update(run="touch canary"), FORM),
    "more in a record": (lambda m: m["files"][FILE].update(run="touch canary"), FORM),
    "text size": (lambda m: m["files"][FILE].update(size_bytes="12"), "but manifest.json lists 12"),
    "short digest": (lambda m: m["files"][FILE].update(sha256="ab"), "but manifest.json lists ab"),
}


@pytest.mark.parametrize(("change", "text"), MANIFESTS.values(), ids=MANIFESTS)
def test_hostile_manifests(place, change, text):
    reseal(place, change)
    refused(place, text)


def header(value: Any, data: bytes = bytes(16), length: int | None = None, state: str = '{"tensor": "w"}') -> bytes:
    text = json.dumps({"__metadata__": {"state": state}} | value).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def w(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


HEADERS = {
    "huge length": header(w([4], [0, 16]), length=2**63),
    "length past the end": header(w([4], [0, 16]), length=10_000),
    "past the end": header(w([5], [0, 20])),
    "shared": header(w([10], [0, 10], "U8") | {"v": w([10], [0, 10], "U8")["w"]}),
    "shape too large": header(w([2**40, 2**40], [0, 16])),
    "empty and too large": header(w([0, 2**62, 2**62], [0, 0]), data=b""),
    "empty and larger": header(w([0, 2**64 - 1], [0, 0]), data=b""),
    "negative": header(w([-4], [0, 16])),
    "unknown dtype": header(w([4], [0, 16], dtype="object")),
    "dtype without a torch dtype": header(w([4], [0, 3], dtype="F6_E2M3"), data=b"xxx"),
    "no state": header({"__metadata__": {}} | w([4], [0, 16])),
}


@pytest.mark.parametrize("data", HEADERS.values(), ids=HEADERS)
def test_hostile_headers(place, data):
    (place / FILE).write_bytes(data)
    reseal(place)
    refused(place, f"{FILE} cannot be read: ")


SKELETONS = {
    "nothing": "",
    "deep": "[" * 100_000 + "]" * 100_000,
    "deep objects": '{"dict":' * 100_000,
    "digits": "1" * 10_000,
    "two kinds": '{"dict": [], "tuple": []}',
    "no kind": "{}",
    "unknown kind": '{"call": ["os.system", "touch canary"]}',
    "float of anything": '{"float": "__import__"}',
    "dict of text": '{"dict": ["abc"]}',
    "key list": '{"dict": [[[], 1]]}',
    "tensor unknown": '{"tensor": "v"}',
    "bytes of code": '{"bytes": ["w", "os", [2]]}',
    "bytes without": '{"bytes": []}',
    "bytes of shape": '{"bytes": ["w", "complex128", [-1, -1]]}',
    "bytes of NaN": '{"bytes": ["w", "complex128", [NaN]]}',
}


@pytest.mark.parametrize("text", SKELETONS.values(), ids=SKELETONS)
def test_hostile_states(place, text):
    (place / FILE).write_bytes(header(w([4], [0, 16]), state=text))
    reseal(place)
    refused(place, f"{FILE} cannot be read: ")


KINDS: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("name", ["manifest.json", FILE])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_what_is_not_a_regular_file_is_not_opened(place, name, make):
    (place / name).unlink()
    make(place / name)
    refused(place, f"{name} is not a regular file")


def test_a_link_in_place_of_a_folder_is_not_followed(place, tmp_path):
    moved = tmp_path / "moved"
    os.rename(place, moved)
    place.symlink_to(moved)
    refused(place, "step-00000002 is not a folder. A checkpoint is a folder, and not a link to one")
    checkpoint.save(place.parent, {"n": 22}, step=2)
    assert checkpoint.load(place.parent).state == {"n": 22}
    assert sorted(os.listdir(moved)) == ["manifest.json", FILE]
    assert sorted(os.listdir(place.parent)) == ["step-00000001", "step-00000002"]
