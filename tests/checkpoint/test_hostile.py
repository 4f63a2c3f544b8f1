"""Hostile manifests, and other things than files: each is refused, nothing runs, nothing hangs.

The manifest is not a signature, so the author of a hostile checkpoint can write digests that fit. What protects then is
that every format is checked, and that no format can run anything.
"""

from __future__ import annotations

import io
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
from laconic.checkpoint.files import MAX_JSON_BYTES
from tests.checkpoint.hostile import FILE, refused, reseal, seal


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
    refused(place, f"{FILE} has 1099511627776 bytes, but manifest.json lists")


FORM = "is not that of a laconic checkpoint of version 2 and step 2 with one file for each worker"
RECORD = "but manifest.json lists"


def renamed(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda m: m["files"].update({name: m["files"].pop(FILE)})


def listed(**record: Any) -> Callable[[dict[str, Any]], object]:
    return lambda m: m["files"][FILE].update(record)


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "path out": (renamed("../worker-00000.safetensors"), FORM),
    "absolute": (renamed("/etc/passwd"), FORM),
    "separator": (renamed("a/b"), FORM),
    "empty name": (renamed(""), FORM),
    "itself": (renamed("manifest.json"), FORM),
    "one more": (lambda m: m["files"].update(more=m["files"][FILE]), FORM),
    "no files": (lambda m: m.update(files={}), FORM),
    "files a list": (lambda m: m.update(files=[FILE]), FORM),
    "many workers": (lambda m: m.update(workers=10**18), FORM),
    "no workers": (lambda m: m.update(workers=0), FORM),
    "true workers": (lambda m: m.update(workers=True), FORM),
    "half a step": (lambda m: m.update(step=2.0), FORM),
    "NaN steps": (lambda m: m.update(step=math.nan), FORM),
    "another step": (lambda m: m.update(step=3), FORM),
    "old version": (lambda m: m.update(version=1), r"'version': 1, .*Load another version with the laconic that"),
    "format": (lambda m: m.update(format="other"), FORM),
    "more fields": (lambda m: m.update(run="touch canary"), FORM),
    "negative size": (listed(size_bytes=-1), RECORD),
    "text size": (listed(size_bytes="12"), RECORD),
    "huge size": (listed(size_bytes=2**70), RECORD),
    "other size": (listed(size_bytes=5), "but manifest.json lists 5: its bytes are not"),
    "short digest": (listed(sha256="ab"), RECORD),
    "upper digest": (listed(sha256="A" * 64), RECORD),
    "more records": (listed(run="touch canary"), FORM),
    "no digest": (lambda m: m["files"][FILE].pop("sha256"), FORM),
    "record a list": (lambda m: m["files"].update({FILE: []}), FORM),
}


@pytest.mark.parametrize(("change", "text"), MANIFESTS.values(), ids=MANIFESTS)
def test_hostile_manifests(place, change, text):
    reseal(place, change)
    refused(place, text)


def link(path: Path) -> None:
    path.with_name(f"copy of {path.name}").write_bytes(b"")
    path.symlink_to(f"copy of {path.name}")


def listening(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(path.name)
    os.chdir(here)


def endless(path: Path) -> None:
    try:
        os.mknod(path, 0o020666, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("needs root to make a device")


KINDS: dict[str, Callable[[Path], object]] = {
    "link": link,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "socket": listening,
    "device": endless,
}


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256", FILE])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_what_is_not_a_regular_file_is_not_opened(place, name, make):
    (place / name).unlink()
    make(place / name)
    refused(place, f"{name} is not a regular file")


@pytest.mark.parametrize(
    "make", [Path.touch, os.mkfifo, *(lambda path, to=to: path.symlink_to(to) for to in ("no", "2"))]
)
def test_what_is_not_a_folder_is_not_a_checkpoint(place, make):
    os.rename(place, place.parent / "2")
    make(place)
    refused(place, "step-00000002 is not a folder. A checkpoint is a folder, and not a link to one")


def test_saving_replaces_a_link_and_does_not_follow_it(place, tmp_path):
    moved = tmp_path / "moved"
    os.rename(place, moved)
    place.symlink_to(moved)
    checkpoint.save(place.parent, {"n": 22}, step=2)
    assert checkpoint.load(place.parent).state == {"n": 22}
    assert sorted(os.listdir(moved)) == ["manifest.json", "manifest.sha256", FILE]
