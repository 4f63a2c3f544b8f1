"""Read a safetensors file in one pass: into memory that torch owns, while a thread computes its digest.

The file is read and not mapped to memory: if a mapped file is truncated, the process ends with SIGBUS. safetensors
checks the header: that tensors lie one after the other, do not overlap, and fill the rest of the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from laconic.checkpoint.tree import NATIVE_DTYPES, CheckpointError, as_bytes

_NAMES = "F64 F32 F16 BF16 I64 I32 I16 I8 U64 U32 U16 U8 BOOL F8_E4M3 F8_E5M2"
_DTYPES = dict(zip(_NAMES.split(), NATIVE_DTYPES.values(), strict=True))
_BLOCK_BYTES = 4 << 20
"""How much is read at a time: the digest of a block is computed while the next one is read."""


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
    left = memoryview(as_bytes(t).numpy())
    while left:
        count = file.readinto(left[:_BLOCK_BYTES])
        if not count:
            raise CheckpointError(f"it ends {len(left)} bytes before its last tensor does.")
        yield left[:count]
        left = left[count:]
