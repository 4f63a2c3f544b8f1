"""Hostile safetensors files, with digests that fit: each is refused, nothing runs, and little memory is used."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from safetensors import safe_open

from laconic.checkpoint import CheckpointError
from laconic.checkpoint.files import read_worker_file, write_worker_file
from tests.checkpoint.hostile import FILE, refused, reseal

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
    refused(place, rf"{FILE} cannot be read: (its state is not valid JSON|it (has|is|uses)|shape)")


GOOD = {"state": '{"dict": [["w", {"tensor": "w"}], ["n", 2]]}'}


def header(value: Any, data: bytes = bytes(16), length: int | None = None) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps({"__metadata__": GOOD} | value).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def w(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


TWO = {"w": {"dtype": "U8", "shape": [10], "data_offsets": [0, 10]}}
JSON = "invalid JSON in header"
HUGE = "cannot be read: .*([Oo]verflow|range|large)"
OFFSET = "invalid offset for tensor `[vw]`"
HEADERS: dict[str, tuple[bytes, str]] = {
    "huge length": (header(w([4], [0, 16]), length=2**63), "header too large"),
    "length past the end": (header(w([4], [0, 16]), length=10_000), "invalid header length"),
    "no length": (b"\x10", "header too small"),
    "deep": (header(b"[" * 100_000), JSON),
    "past the end": (header(w([5], [0, 20])), "file not fully covered"),
    "backwards": (header(w([4], [16, 0])), OFFSET),
    "shared": (header(TWO | {"v": TWO["w"]}), OFFSET),
    "shape too large": (header(w([2**40, 2**40], [0, 16])), "overflow computing buffer size"),
    "empty and too large": (
        header(w([0, 2**62, 2**62], [0, 0]), data=b""),
        HUGE,
    ),
    "empty and larger": (header(w([0, 2**64 - 1], [0, 0]), data=b""), HUGE),
    "negative": (header(w([-4], [0, 16])), JSON),
    "NaN": (header(w([math.nan], [0, 16])), JSON),
    "bool": (header(w([True, 4], [0, 16])), JSON),
    "unknown dtype": (header(w([4], [0, 16], dtype="object")), JSON),
    "half a byte": (header(w([3], [0, 1], dtype="F4"), data=b"x"), "does not end up at a byte boundary"),
    "dtype without a torch dtype": (
        header(w([4], [0, 3], dtype="F6_E2M3"), data=b"xxx"),
        "has the dtype F6_E2M3, which no checkpoint has",
    ),
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
    record = write_worker_file(path, {"tensor": "a"}, {"a": torch.zeros(1000)})

    @contextmanager
    def cut(*args: Any, **options: Any) -> Iterator[Any]:
        with safe_open(*args, **options) as opened:
            os.truncate(path, 200)
            yield opened

    monkeypatch.setattr("laconic.checkpoint.tensor_file.safe_open", cut)
    with pytest.raises(CheckpointError, match=r"x has 200 bytes, but manifest.json lists \d+: its bytes are not those"):
        read_worker_file(path, record)
    record = write_worker_file(tmp_path / "y", {"tensor": "a"}, {"a": torch.zeros(1000)})
    path = tmp_path / "y"
    with pytest.raises(CheckpointError, match=r"y cannot be read: it ends \d+ bytes before its last tensor does"):
        read_worker_file(path)
