"""Files that mean harm, with digests that fit: each is refused, nothing runs, nothing hangs.

The manifest is no signature, so the author of a hostile checkpoint seals it well. What protects then is that every
format is read strictly, and that no format can run anything.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic import checkpoint
from laconic.checkpoint import CheckpointError
from laconic.checkpoint.files import JSON_BYTES

TREE, TENSORS = "worker-00000.json", "worker-00000.safetensors"


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    """The folder of a good generation, and an older one that can be stepped back to."""
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
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(manifest)
    seal(place, json.dumps(manifest).encode())


def seal(place: Path, manifest: bytes) -> None:
    (place / "manifest.json").write_bytes(manifest)
    (place / "manifest.sha256").write_text(f"{hashlib.sha256(manifest).hexdigest()}  manifest.json\n")


def refused(place: Path, text: str) -> None:
    """Refused by each way in, and the older generation is taken."""
    folder = place.parent
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(folder, step=2)
    assert [generation.good for generation in checkpoint.verify(folder)] == [True, False]
    assert isinstance(checkpoint.generations(folder), list)
    assert checkpoint.load(folder).state["n"] == 1
    assert not list(folder.parent.rglob("canary*"))


class Bomb:
    def __reduce__(self):
        return os.system, ("touch canary",)


def zip_bomb() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb()))
        archive.writestr("archive/data/0", bytes(10 << 20))
    return out.getvalue()


def torch_saved() -> bytes:
    out = io.BytesIO()
    torch.save({"bomb": Bomb()}, out)
    return out.getvalue()


FOREIGN = {
    "pickle": pickle.dumps(Bomb()),
    "old pickle": pickle.dumps(Bomb(), protocol=0),
    "torch.save": torch_saved(),
    "zip bomb": zip_bomb(),
    "text": b"#!/bin/sh\ntouch canary\n",
    "python": b"__import__('os').system('touch canary')",
    "nothing": b"",
    "zeros": bytes(100),
    "ones": b"\xff" * 100,
    "not utf-8": b"\x02\0\0\0\0\0\0\0\xff\xfe",
}


@pytest.mark.parametrize("name", [TREE, TENSORS])
@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_foreign_files_under_our_names(place, name, data):
    (place / name).write_bytes(data)
    reseal(place)
    refused(place, name)


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_foreign_manifests(place, data):
    seal(place, data)
    refused(place, "manifest.json is not")
    (place / "manifest.sha256").write_bytes(data)
    refused(place, r"manifest.json has the SHA-256|manifest.sha256 has \d+ bytes")


def sparse(path: Path, size_bytes: int) -> None:
    path.unlink()
    path.touch()
    os.truncate(path, size_bytes)


def test_huge_files_are_not_read(place):
    sparse(place / "manifest.sha256", 1 << 40)
    refused(place, "manifest.sha256 has 1099511627776 bytes, and 1024 is the most")
    sparse(place / "manifest.json", 1 << 40)
    refused(place, f"manifest.json has 1099511627776 bytes, and {JSON_BYTES} is the most")


def test_a_huge_tree_is_not_read(place):
    reseal(place, lambda m: m["files"].update({TREE: {"bytes": 1 << 40, "sha256": "0" * 64}}))
    sparse(place / TREE, JSON_BYTES + 1)
    refused(place, f"{TREE} has {JSON_BYTES + 1} bytes, and the manifest says 1099511627776")


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "path out": (
        lambda m: m["files"].update({"../worker-00000.json": m["files"].pop(TREE)}),
        "not the name of a worker's",
    ),
    "absolute": (lambda m: m["files"].update({"/etc/passwd": m["files"].pop(TREE)}), "lists '/etc/passwd'"),
    "separator": (lambda m: m["files"].update({"a/b": m["files"].pop(TREE)}), "lists 'a/b'"),
    "empty name": (lambda m: m["files"].update({"": m["files"].pop(TREE)}), "lists ''"),
    "itself": (lambda m: m["files"].update({"manifest.json": m["files"].pop(TREE)}), "lists 'manifest.json'"),
    "one more": (lambda m: m["files"].update({"more": m["files"][TREE]}), "does not list the 2 files of 1 workers"),
    "no files": (lambda m: m.update(files={}), "does not list the 2 files"),
    "files a list": (lambda m: m.update(files=[TREE, TENSORS]), "does not list the 2 files"),
    "many workers": (lambda m: m.update(workers=10**18), "does not list the"),
    "no workers": (lambda m: m.update(workers=0), "not a whole number"),
    "true workers": (lambda m: m.update(workers=True), "not a whole number"),
    "half a step": (lambda m: m.update(step=2.0), "not a whole number"),
    "another step": (lambda m: m.update(step=3), "is that of step 3, and lies where step 2 should"),
    "version": (lambda m: m.update(version=2), "is of version 2; this laconic reads version 1"),
    "format": (lambda m: m.update(format="other"), "is not that of a laconic checkpoint"),
    "more fields": (lambda m: m.update(run="touch canary"), "has the fields"),
    "negative size": (lambda m: m["files"][TREE].update(bytes=-1), "a size that is not a whole number"),
    "text size": (lambda m: m["files"][TREE].update(bytes="12"), "a size that is not a whole number"),
    "huge size": (lambda m: m["files"][TREE].update(bytes=2**70), "a size that is not a whole number"),
    "other size": (lambda m: m["files"][TREE].update(bytes=5), "and the manifest says 5: it was cut, or grew"),
    "short digest": (lambda m: m["files"][TREE].update(sha256="ab"), "not 64 hexadecimal digits"),
    "upper digest": (lambda m: m["files"][TREE].update(sha256="A" * 64), "not 64 hexadecimal digits"),
    "no digest": (lambda m: m["files"][TREE].pop("sha256"), "something other than bytes and sha256"),
    "facts a list": (lambda m: m["files"].update({TREE: []}), "something other than bytes and sha256"),
}


@pytest.mark.parametrize(("change", "text"), MANIFESTS.values(), ids=MANIFESTS)
def test_manifests_that_lie(place, change, text):
    reseal(place, change)
    refused(place, text)


JSONS = {
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"dict":' * 100_000,
    "not so deep": b"[" * 200 + b"]" * 200,
    "key twice": b'{"dict": {"a": 1, "a": 2}}',
    "kind twice": b'{"dict": {}, "dict": {}}',
    "NaN": b"[NaN]",
    "Infinity": b"-Infinity",
    "too large": b"1e999",
    "digits": b"1" * 10_000,
    "two kinds": b'{"dict": {}, "tuple": []}',
    "no kind": b"{}",
    "unknown kind": b'{"call": ["os.system", "touch canary"]}',
    "float of anything": b'{"float": "__import__"}',
    "dict of list": b'{"dict": []}',
    "tuple of text": b'{"tuple": "abc"}',
    "items of text": b'{"items": ["ab"]}',
    "item key": b'{"items": [[null, 1]]}',
    "item key list": b'{"items": [[[], 1]]}',
    "item twice": b'{"items": [[1, 1], [1, 2]]}',
    "bool key": b'{"items": [[true, 1]]}',
    "tensor number": b'{"tensor": 1}',
    "tensor unknown": b'{"tensor": "v"}',
    "tensor twice": b'[{"tensor": "w"}, {"tensor": "w"}]',
    "tensor unused": b"[]",
    "bits of F32": b'{"bits": ["w", "complex64", [2]]}',
    "bits of code": b'{"bits": ["w", "os", [2]]}',
    "bits of list": b'{"bits": ["w", [], [2]]}',
    "bits without": b'{"bits": []}',
    "bits shape": b'{"bits": ["w", "complex64", [-1]]}',
    "bits NaN": b'{"bits": ["w", "complex64", ["NaN"]]}',
    "two values": b"1 2",
    "cut": b'{"dict": {"w"',
}


@pytest.mark.parametrize("data", JSONS.values(), ids=JSONS)
def test_trees_that_lie(place, data):
    (place / TREE).write_bytes(data)
    reseal(place)
    refused(place, r"(the state of worker 0 cannot be read: .+|worker-00000.json is not JSON as it is written here)")


def header(value: Any, data: bytes = bytes(16), length: int | None = None) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def w(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


TWO = {"w": {"dtype": "U8", "shape": [10], "data_offsets": [0, 10]}}
HEADERS: dict[str, tuple[bytes, str]] = {
    "huge length": (header(w([4], [0, 16]), length=2**63), "says that its header has 9223372036854775808 bytes"),
    "length past the end": (header(w([4], [0, 16]), length=10_000), "says that its header has 10000 bytes"),
    "no length": (b"\x10", "says that its header has 0 bytes"),
    "length 0": (header(b""), "says that its header has 0 bytes"),
    "a list": (header([]), "no JSON object"),
    "deep": (header(b"[" * 100_000), "is not JSON"),
    "key twice": (header(b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"w":{}}'), "a key is there twice"),
    "past the end": (header(w([5], [0, 20])), "has 16 bytes of tensors, and its header speaks of 20"),
    "not to the end": (header(w([3], [0, 12])), "has 16 bytes of tensors, and its header speaks of 12"),
    "not from the start": (header(w([3], [4, 16])), "at byte 4, where byte 0 comes next"),
    "backwards": (header(w([4], [16, 0])), "and -16 bytes, which do not fit"),
    "overlapping": (
        header(TWO | {"v": {"dtype": "U8", "shape": [10], "data_offsets": [6, 16]}}),
        "'v' at byte 6, where byte 10 comes next",
    ),
    "shared": (header(TWO | {"v": TWO["w"]}), "at byte 0, where byte 10 comes next"),
    "a hole": (
        header(TWO | {"v": {"dtype": "U8", "shape": [4], "data_offsets": [12, 16]}}),
        "at byte 12, where byte 10 comes next",
    ),
    "shape too large": (header(w([2**40, 2**40], [0, 16])), "which do not fit"),
    "shape that wraps": (header(w([2**62 + 1, 4], [0, 16])), "which do not fit"),
    "empty and too large": (header(w([0, 2**62, 2**62], [0, 0]), data=b""), "has no room"),
    "negative": (header(w([-4], [0, 16])), "not whole numbers from 0 up"),
    "two negatives": (header(w([-2, -2], [0, 16])), "not whole numbers from 0 up"),
    "NaN": (header(w([math.nan], [0, 16])), "NaN is not JSON"),
    "text NaN": (header(w(["NaN"], [0, 16])), "not whole numbers"),
    "float": (header(w([4.0], [0, 16])), "not whole numbers"),
    "bool": (header(w([True, 4], [0, 16])), "not whole numbers"),
    "null shape": (header(w(None, [0, 16])), "not whole numbers"),
    "nested shape": (header(w([[4]], [0, 16])), "not whole numbers"),
    "many dimensions": (header(w([1] * 100_000 + [4], [0, 16])), "not whole numbers"),
    "three offsets": (header(w([4], [0, 8, 16])), "not whole numbers"),
    "float offsets": (header(w([4], [0.0, 16.0])), "not whole numbers"),
    "unknown dtype": (header(w([4], [0, 16], dtype="object")), "the unknown dtype 'object'"),
    "dtype a list": (header(w([4], [0, 16], dtype=["F32"])), "the unknown dtype"),
    "more facts": (header({"w": w([4], [0, 16])["w"] | {"loader": "os.system"}}), "something other than dtype, shape"),
    "facts a list": (header({"w": []}), "something other than dtype, shape"),
    "another name": (header({"v": w([4], [0, 16])["w"]}), "has no tensor 'w'"),
    "one more": (
        header(w([3], [0, 12]) | {"more": {"dtype": "U8", "shape": [4], "data_offsets": [12, 16]}}),
        "has tensors that its state does not name: .'more'",
    ),
}


@pytest.mark.parametrize(("data", "text"), HEADERS.values(), ids=HEADERS)
def test_headers_that_lie(place, data, text):
    (place / TENSORS).write_bytes(data)
    reseal(place)
    refused(place, text)


def test_bools_are_zero_or_one(place):
    (place / TENSORS).write_bytes(header(w([16], [0, 16], dtype="BOOL"), data=b"\1\0\2" + bytes(13)))
    reseal(place)
    with pytest.raises(CheckpointError, match="has bools other than 0 and 1"):
        checkpoint.load(place.parent, step=2)


def link(path: Path) -> None:
    copy = path.with_name(f"copy of {path.name}")
    os.rename(path, copy)
    path.symlink_to(copy)


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def listening(path: Path) -> None:
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(path.name)
    os.chdir(here)


def endless(path: Path) -> None:
    path.unlink()
    try:
        os.mknod(path, 0o020666, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("needs root to make a device")


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256", TREE, TENSORS])
@pytest.mark.parametrize("kind", [link, dangling, to_itself, directory, pipe, listening, endless])
def test_what_is_no_file_is_not_opened(place, name, kind):
    kind(place / name)
    refused(
        place, f"{name} is a (symbolic link|directory|pipe|socket|device), where a checkpoint has regular files only"
    )


@pytest.mark.parametrize("kind", ["file", "pipe", "link", "link to a good one"])
def test_what_is_no_folder_is_no_generation(place, kind, tmp_path):
    moved = tmp_path / "moved"
    os.rename(place, moved)
    if kind == "file":
        place.touch()
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(moved if kind == "link to a good one" else "nowhere")
    refused(place, "step-00000002 is a (symbolic link|pipe|regular file), where a generation is a folder")


def test_saving_replaces_what_stands_in_the_way_and_follows_no_link(place, tmp_path):
    moved = tmp_path / "moved"
    os.rename(place, moved)
    place.symlink_to(moved)
    checkpoint.save(place.parent, {"n": 22}, step=2)
    assert checkpoint.load(place.parent).state == {"n": 22}
    assert sorted(path.name for path in moved.iterdir()) == ["manifest.json", "manifest.sha256", TREE, TENSORS]
