"""The safetensors file of one worker: its tensors, and the rest of its state as JSON in the metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from laconic.checkpoint.manifest import MAX_JSON_BYTES, FileRecord, file_record, parse_json
from laconic.checkpoint.records import CheckpointError
from laconic.checkpoint.tree import dense, dtype_name, unflatten


def write_worker_file(path: Path, skeleton: Any, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write what `tree.flatten` returned, fsync it, and return the record of the file."""
    text = json.dumps(skeleton, allow_nan=False, separators=(",", ":"))
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"the state without its tensors takes {len(text)} bytes of JSON; the limit is {MAX_JSON_BYTES}. "
            "Save fewer, larger tensors."
        )
    # Not safetensors.torch.save_file, which refuses tensors that share memory.
    ready = {name: dense(t) for name, t in tensors.items()}  # alive until they are written
    specs = {
        name: TensorSpec(dtype=dtype_name(t.dtype), shape=t.shape, data_ptr=t.data_ptr(), data_len=t.nbytes)
        for name, t in ready.items()
    }
    serialize_file(specs, path, metadata={"state": text})
    os.chmod(path, path.parent.stat().st_mode & 0o666)  # safetensors makes it readable by its owner only
    with path.open("r+b") as file:
        os.fsync(file.fileno())
    return file_record(path)


def read_worker_file(path: Path, *, discard_data: bool = False) -> Any:
    """Read the state from a file whose digest is right. It may be hostile all the same.

    With `discard_data` every tensor is read and then replaced by one on the meta device. Files are read and not
    mapped to memory: a mapped file that is truncated meanwhile would end the process with SIGBUS.
    """
    try:
        with safe_open(path, "pt", backend="pread") as file:
            left = set(file.keys())

            def read(name: str) -> Tensor:
                if name not in left:
                    raise CheckpointError(f"it has no tensor {name[:80]!r}, or uses it twice.")
                left.remove(name)
                t = _read_tensor(file, name)
                return t.to("meta") if discard_data else t.clone()  # into memory that torch can resize

            state = unflatten(parse_json((file.metadata() or {}).get("state", ""), "its state"), read)
            if left:
                raise CheckpointError(f"it has tensors that its state does not use: {str(sorted(left)[:3])[:200]}.")
            return state
    except (SafetensorError, CheckpointError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error


def _read_tensor(file: Any, name: str) -> Tensor:
    try:
        t: Tensor = file.get_tensor(name)
    except (RuntimeError, TypeError, MemoryError) as error:  # an impossible shape
        raise CheckpointError(f"its tensor {name[:80]!r} cannot be made: {str(error)[:200]}") from error
    if t.dtype is torch.bool and t.numel() and int(t.view(torch.uint8).max()) > 1:
        raise CheckpointError(f"its tensor {name[:80]!r} has bools other than 0 and 1.")
    return t
