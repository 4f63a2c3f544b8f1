"""Tensors in a safetensors file, which any tool that reads safetensors opens.

The file is eight bytes with the length of the header, the header in JSON, and then the tensors, end to end. It is
written and read here, in one pass each, and not by the safetensors package: the digest is of the very bytes that go to
the disk, a full disk is an `OSError`, and a file is read through the handle whose digest was checked, not through a
map of its name, where a file that is cut meanwhile ends the process. `tests/checkpoint/test_tensors.py` holds both
against the package.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from laconic.checkpoint.files import JSON_BYTES, fill, parse_json, read_exactly
from laconic.checkpoint.generation import CheckpointError

RESERVED = "__metadata__"
"""The one name in a header that is no tensor's."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

AS_BITS = {
    name: getattr(torch, name)
    for name in (
        "complex32",
        "complex64",
        "complex128",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    )
}
"""Dtypes that not every reader of safetensors knows. They lie in the file as bytes."""


def bits(t: Tensor) -> Tensor:
    """Return the bytes of a tensor, [bytes], on the CPU: without a copy where it is there, and dense."""
    return t.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)


def snapshot(t: Tensor) -> Tensor:
    """Copy a tensor to the CPU, dense, so that training may go on with the original."""
    return t.detach().resolve_conj().resolve_neg().to("cpu", copy=True, memory_format=torch.contiguous_format)


def chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield what a file of these tensors holds, without holding more than one of them twice."""
    # Widest first, so that each begins at a multiple of its width.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, begin = {}, 0
    for name in order:
        t = tensors[name]
        known = t.dtype in NAMES
        end = begin + t.numel() * t.element_size()
        shape = list(t.shape) if known else [end - begin]
        header[name] = {"dtype": NAMES[t.dtype] if known else "U8", "shape": shape, "data_offsets": [begin, end]}
        begin = end
    yield _head(header)
    for name in order:
        yield bits(tensors[name]).numpy().data


def _head(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > JSON_BYTES:
        raise CheckpointError(
            f"the names and shapes of {len(header)} tensors take {len(text)} bytes; {JSON_BYTES} is the most."
        )
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class _Entry:
    dtype: torch.dtype
    shape: list[int]
    begin: int
    end: int


class TensorFile:
    """An open file of tensors whose header has been checked; each tensor may be taken once.

    A tensor is never longer than the file that it is in, so no file can make memory out of nothing.
    """

    def __init__(self, file: FileIO, path: Path) -> None:
        self._file, self._path = file, path
        size_bytes = os.fstat(file.fileno()).st_size
        head_bytes = int.from_bytes(read_exactly(file, 8, path), "little") if size_bytes >= 8 else 0
        if not 2 <= head_bytes <= min(JSON_BYTES, size_bytes - 8):
            self._refuse(f"says that its header has {head_bytes} bytes, which it cannot have")
        header = parse_json(bytes(read_exactly(file, head_bytes, path)), f"the header of {path.name}")
        self._start = 8 + head_bytes
        self.entries = self._check(header, size_bytes - self._start)

    def take(self, name: str) -> Tensor:
        """Read a tensor."""
        entry = self._pop(name)
        t = _empty(entry, name)
        target = t.reshape(-1).view(torch.uint8)
        self._file.seek(self._start + entry.begin)
        fill(self._file, target.numpy().data, self._path)
        if entry.dtype is torch.bool and bool((target > 1).any()):
            self._refuse(f"has bools other than 0 and 1 in {name[:80]!r}")
        return t

    def skip(self, name: str) -> Tensor:
        """Take a tensor without reading it: one without data, of its dtype and shape."""
        return _empty(self._pop(name), name, device="meta")

    def finish(self) -> None:
        """Make sure that nothing is left."""
        if self.entries:
            self._refuse(f"has tensors that its state does not name: {str(sorted(self.entries)[:3])[:200]}")

    def _pop(self, name: str) -> _Entry:
        entry = self.entries.pop(name, None)
        if entry is None:
            self._refuse(f"has no tensor {name[:80]!r}, or its state names it twice")
        return entry

    def _check(self, header: Any, data_bytes: int) -> dict[str, _Entry]:
        if not isinstance(header, dict):
            self._refuse("has a header that is no JSON object")
        entries = {name: self._entry(name, facts) for name, facts in header.items() if name != RESERVED}
        expected = 0
        for name, entry in sorted(entries.items(), key=lambda each: (each[1].begin, each[1].end)):
            if entry.begin != expected:
                self._refuse(f"has {name[:80]!r} at byte {entry.begin}, where byte {expected} comes next")
            expected = entry.end
        if expected != data_bytes:
            self._refuse(f"has {data_bytes} bytes of tensors, and its header speaks of {expected}")
        return entries

    def _entry(self, name: str, facts: Any) -> _Entry:
        if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
            self._refuse(f"says of {name[:80]!r} something other than dtype, shape and data_offsets")
        dtype, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            self._refuse(f"gives {name[:80]!r} the unknown dtype {str(dtype)[:40]!r}")
        if not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
            self._refuse(f"gives {name[:80]!r} a shape or offsets that are not whole numbers from 0 up")
        begin, end = offsets
        if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            self._refuse(f"gives {name[:80]!r} the shape {str(shape)[:80]} and {end - begin} bytes, which do not fit")
        return _Entry(DTYPES[dtype], shape, begin, end)

    def _refuse(self, finding: str) -> NoReturn:
        raise CheckpointError(f"{self._path.name} {finding}.")


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 64 and all(type(x) is int and 0 <= x < 2**63 for x in value)


def _empty(entry: _Entry, name: str, device: str = "cpu") -> Tensor:
    try:
        return torch.empty(entry.shape, dtype=entry.dtype, device=device)
    except (RuntimeError, TypeError, MemoryError) as error:
        raise CheckpointError(
            f"its tensor {name[:80]!r} of shape {str(entry.shape)[:80]} has no room: {error}"
        ) from error
