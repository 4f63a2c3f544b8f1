"""Write and read a safetensors file at the speed of the disk: once, while a thread computes the digest.

Tensors are written straight from their memory, and read into memory that torch owns. A file is read and not mapped to
memory: if a mapped file is truncated, the process ends with SIGBUS. The safetensors package checks headers that are
read: that tensors lie one after the other, do not overlap, and fill the rest of the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from laconic.checkpoint.tree import NATIVE_DTYPES, CheckpointError, memory_of

_NAMES = "F64 F32 F16 BF16 I64 I32 I16 I8 U64 U32 U16 U8 BOOL F8_E4M3 F8_E5M2"
_DTYPES = dict(zip(_NAMES.split(), NATIVE_DTYPES.values(), strict=True))
_KINDS = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors package."""
_BLOCK_BYTES = 4 << 20
"""How much is written or read at a time: the digest of a block is computed while the next one is."""


def write_tensors(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write a file and fsync it; return its size and SHA-256, which is that of what the file holds."""
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())  # each begins at a multiple of its size
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        t, begin, end = tensors[name], end, end + tensors[name].nbytes
        header[name] = {"dtype": _KINDS[t.dtype], "shape": list(t.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the names, shapes and other values of the state have {len(text)} bytes, above {_MAX_HEADER_BYTES}, which "
            "is the limit of safetensors. Join small tensors, or save lists as tensors."
        )
    with path.open("w+b", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        digest = _DigestOfFile(file)
        blocks = [pool.submit(digest.add, _write(file, memoryview(len(text).to_bytes(8, "little") + text)))]
        for name in names:
            data = memory_of(tensors[name])
            for first in range(0, len(data), _BLOCK_BYTES):
                blocks.append(pool.submit(digest.add, _write(file, data[first : first + _BLOCK_BYTES])))
        os.fsync(file.fileno())
        for block in blocks:
            block.result()
        return file.tell(), digest.sha256.hexdigest()


def _write(file: FileIO, data: memoryview) -> int:
    """Write all of it; return how many bytes that were."""
    left = data
    while left:
        left = left[file.write(left) :]
    return len(data)


class _DigestOfFile:
    """The digest of what a file holds so far: other threads may change a tensor while it is written."""

    def __init__(self, file: FileIO) -> None:
        self.sha256 = hashlib.sha256()
        self._file, self._done, self._room = file.fileno(), 0, bytearray(_BLOCK_BYTES)

    def add(self, size: int) -> None:
        """Read the next `size` bytes, which have been written, and add them."""
        end = self._done + size
        while self._done < end:
            with memoryview(self._room)[: end - self._done] as room:
                count = os.preadv(self._file, [room], self._done)
                if not count:
                    raise CheckpointError(f"the file ends at {self._done} bytes, but more were written: is it shared?")
                self.sha256.update(room[:count])
            self._done += count


def read_tensors(
    path: Path, file: BufferedReader, *, discard_data: bool
) -> tuple[dict[str, str], dict[str, Tensor], str]:
    """Read the whole of `file`, which is open at its start; return metadata, tensors by name, and the SHA-256.

    With `discard_data`, tensors are on the meta device, and one at a time is in memory.
    """
    digest, tensors = hashlib.sha256(), dict[str, Tensor]()
    with safe_open(path, "pt", backend="pread") as header, ThreadPoolExecutor(1) as pool:
        digest.update(length := file.read(8))
        digest.update(file.read(int.from_bytes(length, "little")))
        hashed: Future[None] | None = None
        for name in header.offset_keys():
            stored = header.get_slice(name)
            if (kind := stored.get_dtype()) not in _DTYPES:
                raise CheckpointError(f"its tensor {name!r} has the dtype {kind}, which no checkpoint has.")
            t = torch.empty(stored.get_shape(), dtype=_DTYPES[kind])
            for block in _blocks(file, t):
                hashed = pool.submit(digest.update, block)
            if t.dtype is torch.bool and t.numel() and int(t.view(torch.uint8).max()) > 1:
                raise CheckpointError(f"its tensor {name!r} has bools other than 0 and 1.")
            if discard_data:
                if hashed is not None:
                    hashed.result()
                t = t.to("meta")
            tensors[name] = t
        metadata: dict[str, str] = header.metadata() or {}
    digest.update(file.read())  # nothing, unless the file has grown meanwhile
    return metadata, tensors, digest.hexdigest()


def _blocks(file: BufferedReader, t: Tensor) -> Iterator[memoryview]:
    """Read the bytes of a tensor, and yield them block by block."""
    left = memory_of(t)
    while left:
        count = file.readinto(left[:_BLOCK_BYTES])
        if not count:
            raise CheckpointError(f"it ends {len(left)} bytes before its last tensor does.")
        yield left[:count]
        left = left[count:]
