"""Hostile files with digests that fit: each is refused, nothing runs, nothing hangs.

The manifest is not a signature, so the author of a hostile checkpoint can write digests that fit. What protects then is
that every format is checked, and that no format can run anything.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import resource
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic import checkpoint
from laconic.checkpoint import CheckpointError
from laconic.checkpoint.checked_files import MAX_JSON_BYTES
from laconic.checkpoint.worker_file import read_worker_file, write_worker_file

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


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_foreign_files_under_our_names(place, data):
    (place / FILE).write_bytes(data)
    reseal(place)
    refused(place, f"{FILE} cannot be read: Error while deserializing header")


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_foreign_manifests(place, data):
    seal(place, data)
    refused(place, "manifest.json is not")
    (place / "manifest.sha256").write_bytes(data)
    refused(place, r"manifest.json has the SHA-256|manifest.sha256 has more than 1024 bytes")


def sparse(path: Path, size_bytes: int) -> None:
    path.unlink()
    path.touch()
    os.truncate(path, size_bytes)


def test_huge_files_are_not_read(place):
    sparse(place / "manifest.sha256", 1 << 40)
    refused(place, "manifest.sha256 has more than 1024 bytes")
    sparse(place / "manifest.json", 1 << 40)
    refused(place, f"manifest.json has more than {MAX_JSON_BYTES} bytes, which is the limit")


def test_a_huge_file_of_another_size_is_not_read(place):
    sparse(place / FILE, 1 << 40)
    refused(place, f"{FILE} has 1099511627776 bytes, but the manifest lists")


NAMES = "does not list exactly one file for each of"
WHOLE = "a step or a number of workers that is not a whole number"
RECORD = "has a file without a valid size and SHA-256"


def renamed(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda m: m["files"].update({name: m["files"].pop(FILE)})


def listed(**record: Any) -> Callable[[dict[str, Any]], object]:
    return lambda m: m["files"][FILE].update(record)


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "path out": (renamed("../worker-00000.safetensors"), NAMES),
    "absolute": (renamed("/etc/passwd"), NAMES),
    "separator": (renamed("a/b"), NAMES),
    "empty name": (renamed(""), NAMES),
    "itself": (renamed("manifest.json"), NAMES),
    "one more": (lambda m: m["files"].update(more=m["files"][FILE]), NAMES),
    "no files": (lambda m: m.update(files={}), NAMES),
    "files a list": (lambda m: m.update(files=[FILE]), NAMES),
    "many workers": (lambda m: m.update(workers=10**18), NAMES),
    "no workers": (lambda m: m.update(workers=0), WHOLE),
    "true workers": (lambda m: m.update(workers=True), WHOLE),
    "half a step": (lambda m: m.update(step=2.0), WHOLE),
    "NaN steps": (lambda m: m.update(step=math.nan), WHOLE),
    "another step": (lambda m: m.update(step=3), "belongs to step 3, but is in the folder of step 2"),
    "old version": (lambda m: m.update(version=1), "has format version 1, and this laconic reads version 2 only: load"),
    "format": (lambda m: m.update(format="other"), "is not that of a laconic checkpoint"),
    "more fields": (lambda m: m.update(run="touch canary"), "has missing or unknown fields"),
    "negative size": (listed(size_bytes=-1), RECORD),
    "text size": (listed(size_bytes="12"), RECORD),
    "huge size": (listed(size_bytes=2**70), RECORD),
    "other size": (listed(size_bytes=5), "but the manifest lists 5: it was truncated, or it grew"),
    "short digest": (listed(sha256="ab"), RECORD),
    "upper digest": (listed(sha256="A" * 64), RECORD),
    "more records": (listed(run="touch canary"), RECORD),
    "no digest": (lambda m: m["files"][FILE].pop("sha256"), RECORD),
    "record a list": (lambda m: m["files"].update({FILE: []}), RECORD),
}


@pytest.mark.parametrize(("change", "text"), MANIFESTS.values(), ids=MANIFESTS)
def test_hostile_manifests(place, change, text):
    reseal(place, change)
    refused(place, text)


SKELETONS = {
    "nothing": "",
    "deep": "[" * 100_000 + "]" * 100_000,
    "deep objects": '{"dict":' * 100_000,
    "not so deep": "[" * 200 + "]" * 200,
    "digits": "1" * 10_000,
    "two kinds": '{"dict": [], "tuple": []}',
    "no kind": "{}",
    "unknown kind": '{"call": ["os.system", "touch canary"]}',
    "float of anything": '{"float": "__import__"}',
    "dict of dict": '{"dict": {}}',
    "dict of text": '{"dict": ["ab"]}',
    "tuple of text": '{"tuple": "abc"}',
    "key null": '{"dict": [[null, 1]]}',
    "key list": '{"dict": [[[], 1]]}',
    "key twice": '{"dict": [[1, 1], [1, 2]]}',
    "key bool": '{"dict": [[true, 1]]}',
    "tensor number": '{"tensor": 1}',
    "tensor unknown": '{"tensor": "v"}',
    "tensor twice": '[{"tensor": "w"}, {"tensor": "w"}]',
    "tensor unused": "[]",
    "bytes of float32": '{"bytes": ["w", "complex64", [2]]}',
    "bytes of code": '{"bytes": ["w", "os", [2]]}',
    "bytes of list": '{"bytes": ["w", [], [2]]}',
    "bytes without": '{"bytes": []}',
    "bytes of shape": '{"bytes": ["w", "complex64", [-1]]}',
    "bytes of NaN": '{"bytes": ["w", "complex64", [NaN]]}',
    "two values": "1 2",
    "truncated": '{"dict": [["w"',
}


@pytest.mark.parametrize("text", SKELETONS.values(), ids=SKELETONS)
def test_hostile_states(place, text):
    (place / FILE).write_bytes(header({"__metadata__": {"state": text}} | w([4], [0, 16])))
    reseal(place)
    refused(place, rf"{FILE} cannot be read: (its state is not valid JSON|it (has|is|uses))")


GOOD = {"state": '{"dict": [["w", {"tensor": "w"}], ["n", 2]]}'}


def header(value: Any, data: bytes = bytes(16), length: int | None = None) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps({"__metadata__": GOOD} | value).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def w(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


TWO = {"w": {"dtype": "U8", "shape": [10], "data_offsets": [0, 10]}}
JSON = "invalid JSON in header"
OFFSET = "invalid offset for tensor `[vw]`"
HEADERS: dict[str, tuple[bytes, str]] = {
    "huge length": (header(w([4], [0, 16]), length=2**63), "header too large"),
    "length past the end": (header(w([4], [0, 16]), length=10_000), "invalid header length"),
    "no length": (b"\x10", "header too small"),
    "length 0": (header(b""), JSON),
    "a list": (header(b"[]"), JSON),
    "deep": (header(b"[" * 100_000), JSON),
    "deep objects": (header(b'{"w":' * 100_000), JSON),
    "key twice": (header(b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"w":{}}'), JSON),
    "past the end": (header(w([5], [0, 20])), "file not fully covered"),
    "not to the end": (header(w([3], [0, 12])), "file not fully covered"),
    "not from the start": (header(w([3], [4, 16])), OFFSET),
    "backwards": (header(w([4], [16, 0])), OFFSET),
    "overlapping": (header(TWO | {"v": {"dtype": "U8", "shape": [10], "data_offsets": [6, 16]}}), OFFSET),
    "shared": (header(TWO | {"v": TWO["w"]}), OFFSET),
    "a hole": (header(TWO | {"v": {"dtype": "U8", "shape": [4], "data_offsets": [12, 16]}}), OFFSET),
    "shape too large": (header(w([2**40, 2**40], [0, 16])), "overflow computing buffer size"),
    "shape that wraps": (header(w([2**62 + 1, 4], [0, 16])), "overflow computing buffer size"),
    "empty and too large": (header(w([0, 2**62, 2**62], [0, 0]), data=b""), "its tensor 'w' cannot be made"),
    "empty and larger": (header(w([0, 2**64 - 1], [0, 0]), data=b""), "its tensor 'w' cannot be made"),
    "negative": (header(w([-4], [0, 16])), JSON),
    "two negatives": (header(w([-2, -2], [0, 16])), JSON),
    "NaN": (header(w([math.nan], [0, 16])), JSON),
    "text NaN": (header(w(["NaN"], [0, 16])), JSON),
    "float": (header(w([4.0], [0, 16])), JSON),
    "bool": (header(w([True, 4], [0, 16])), JSON),
    "null shape": (header(w(None, [0, 16])), JSON),
    "nested shape": (header(w([[4]], [0, 16])), JSON),
    "three offsets": (header(w([4], [0, 8, 16])), JSON),
    "float offsets": (header(w([4], [0.0, 16.0])), JSON),
    "unknown dtype": (header(w([4], [0, 16], dtype="object")), JSON),
    "dtype a list": (header(w([4], [0, 16], dtype=["F32"])), JSON),
    "half a byte": (header(w([3], [0, 1], dtype="F4"), data=b"x"), "does not end up at a byte boundary"),
    "dtype without a torch dtype": (header(w([4], [0, 3], dtype="F6_E2M3"), data=b"xxx"), "Dtype not understood"),
    "fact a list": (header({"w": []}), JSON),
    "metadata a list": (header({"__metadata__": []} | w([4], [0, 16])), JSON),
    "metadata a number": (header({"__metadata__": {"state": 1}} | w([4], [0, 16])), JSON),
    "no state": (header({"__metadata__": {}} | w([4], [0, 16])), "its state is not valid JSON"),
    "another name": (header({"v": w([4], [0, 16])["w"]}), "it has no tensor 'w'"),
    "one more": (
        header(w([3], [0, 12]) | {"more": {"dtype": "U8", "shape": [4], "data_offsets": [12, 16]}}),
        r"it has tensors that its state does not use: \['more'\]",
    ),
    "bools of 2": (header(w([16], [0, 16], "BOOL"), data=b"\1\0\2" + bytes(13)), "has bools other than 0 and 1"),
}


@pytest.mark.parametrize(("data", "text"), HEADERS.values(), ids=HEADERS)
def test_hostile_headers(place, data, text):
    (place / FILE).write_bytes(data)
    reseal(place)
    refused(place, text)


def test_a_file_that_is_truncated_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_worker_file(path, {"tensor": "a"}, {"a": torch.zeros(1000)})

    def cut(*args: object) -> Any:
        os.truncate(path, 200)
        return {"tensor": "a"}

    monkeypatch.setattr("laconic.checkpoint.worker_file.parse_json", cut)
    with pytest.raises(CheckpointError, match=r"x cannot be read: .*failed to fill whole buffer"):
        read_worker_file(path)


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


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256", FILE])
@pytest.mark.parametrize("kind", [link, dangling, to_itself, directory, pipe, listening, endless])
def test_what_is_not_a_regular_file_is_not_opened(place, name, kind):
    kind(place / name)
    refused(place, f"{name} is not a regular file")


@pytest.mark.parametrize("kind", ["file", "pipe", "link", "link to a good one"])
def test_what_is_not_a_folder_is_not_a_checkpoint(place, kind, tmp_path):
    moved = tmp_path / "moved"
    os.rename(place, moved)
    if kind == "file":
        place.touch()
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(moved if kind == "link to a good one" else "nowhere")
    refused(place, "step-00000002 is not a folder. A checkpoint is a folder, and not a link to one")


def test_saving_replaces_a_link_and_does_not_follow_it(place, tmp_path):
    moved = tmp_path / "moved"
    os.rename(place, moved)
    place.symlink_to(moved)
    checkpoint.save(place.parent, {"n": 22}, step=2)
    assert checkpoint.load(place.parent).state == {"n": 22}
    assert sorted(os.listdir(moved)) == ["manifest.json", "manifest.sha256", FILE]
