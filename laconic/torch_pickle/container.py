"""torch's three containers of a pickle, and the bytes of the storages in them.

`torch.save` writes a zip archive, uncompressed: the pickle as `data.pkl`, each storage as `data/<key>`.
Before torch 1.6 it wrote four pickles, a list of storage keys and then each storage with its length before it;
`pickle.dumps` of a tensor still embeds that older form, one for each storage. A storage is never longer than
the file that it is in, so no file can make memory out of nothing.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch

from laconic.torch_pickle import machine
from laconic.torch_pickle.machine import Name, Persistent, Program, Record, as_bytes, damaged
from laconic.torch_pickle.names import STORAGES

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
DTYPES: dict[str, torch.dtype] = {f"torch.{name}": getattr(torch, dtype) for name, dtype in STORAGES.items()}


@dataclass(frozen=True)
class Storage:
    """The bytes of a storage, little-endian, and how to read them: `length` elements of `dtype`."""

    dtype: torch.dtype
    data: bytearray
    length: int


@dataclass(frozen=True)
class Unpacked:
    """What a file holds: its pickle as plain data, and how to get a storage that it refers to."""

    program: Program
    storage: Callable[[Any], Storage]


def unpack(data: bytes) -> Unpacked:
    """Tell the three containers apart by their first bytes."""
    if data[:4] == b"PK\x03\x04":
        return _unpack_zip(data)
    source = BytesIO(data)
    program = machine.read(source)
    if type(program.value) is int and program.value == LEGACY_MAGIC:
        return _unpack_legacy(source)
    return Unpacked(program, _Embedded(len(data)).storage)


def _unpack_zip(data: bytes) -> Unpacked:
    try:
        records = _zip_records(data)
    except _ZIP_ERRORS as error:
        damaged(f"its zip archive cannot be read ({error})")
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        damaged("its zip archive has no data.pkl, or several")
    folder = pickles[0].removesuffix("data.pkl")
    if records.get(f"{folder}byteorder", b"little") != b"little":
        damaged("it was saved on a big-endian machine, which is not supported")

    def storage(reference: Any) -> Storage:
        dtype, key, length = _storage_id(reference)
        return _sized(dtype, records.get(f"{folder}data/{key}"), length)

    return Unpacked(machine.read(BytesIO(records[pickles[0]])), storage)


_ZIP_ERRORS = (
    zipfile.BadZipFile,
    EOFError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    UnicodeError,
    struct.error,
)
"""What `zipfile` raises on damaged archives."""


def _zip_records(data: bytes) -> dict[str, bytearray]:
    """All records; torch stores them uncompressed, so together they are shorter than the file."""
    with zipfile.ZipFile(BytesIO(data)) as archive:
        entries = archive.infolist()
        if len({entry.filename for entry in entries}) != len(entries):
            damaged("its zip archive has a record twice")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            damaged("its zip archive is compressed, which torch.save never does")
        if sum(entry.file_size for entry in entries) > len(data):
            damaged("the records of its zip archive are longer than the file")
        return {entry.filename: bytearray(archive.read(entry)) for entry in entries}


def _unpack_legacy(source: BytesIO) -> Unpacked:
    """After the magic number: protocol, facts about the machine, the pickle, the keys, the storages."""
    if machine.read(source).value != LEGACY_PROTOCOL:
        damaged("its protocol is not one of torch.save's")
    facts = machine.read(source).value
    if not isinstance(facts, dict) or facts.get("little_endian") is not True:
        damaged("it was saved on a big-endian machine, which is not supported")
    program = machine.read(source)
    keys = machine.read(source).value
    lengths = dict(_key_and_bytes(reference) for reference in program.references)
    records = _legacy_records(source, keys, lengths)

    def storage(reference: Any) -> Storage:
        dtype, key, length = _storage_id(reference)
        return _sized(dtype, records.get(key), length)

    return Unpacked(program, storage)


def _key_and_bytes(reference: Persistent) -> tuple[str, tuple[int, int]]:
    dtype, key, length = _storage_id(reference)
    return key, (length, length * dtype.itemsize)


def _legacy_records(source: BytesIO, keys: Any, lengths: dict[str, tuple[int, int]]) -> dict[str, bytearray]:
    """The bytes of each storage; before each stands its length in elements, in eight bytes."""
    if not isinstance(keys, list) or not all(isinstance(key, str) and key in lengths for key in keys):
        damaged("its list of storages is not the one of its pickle")
    if len(set(keys)) != len(keys):
        damaged("it has a storage twice")
    rest = source.getbuffer()[source.tell() :]
    records = {}
    for key in keys:
        length, size_bytes = lengths[key]
        if bytes(rest[:8]) != length.to_bytes(8, "little") or len(rest) < 8 + size_bytes:
            damaged(f"storage {key[:40]!r} is not of the length that its pickle says")
        records[key] = bytearray(rest[8 : 8 + size_bytes])
        rest = rest[8 + size_bytes :]
    return records


class _Embedded:
    """The storages of a plain pickle: each is a call with the older container's bytes, unpacked once."""

    def __init__(self, file_bytes: int) -> None:
        self.left_bytes = file_bytes
        self.unpacked: dict[int, Storage] = {}

    def storage(self, reference: Any) -> Storage:
        """The storage of such a call; together they cannot be longer than the file."""
        if not isinstance(reference, Record) or reference.name != "torch.storage._load_from_bytes":
            damaged("a tensor has no storage")
        if id(reference) not in self.unpacked:
            data = as_bytes(reference.args[0] if len(reference.args) == 1 else None)
            self.left_bytes -= len(data)
            if self.left_bytes < 0:
                damaged("its storages are together longer than the file")
            self.unpacked[id(reference)] = _unpack_embedded(data)
        return self.unpacked[id(reference)]


def _unpack_embedded(data: bytes) -> Storage:
    source = BytesIO(data)
    if machine.read(source).value != LEGACY_MAGIC:
        damaged("a storage is not in torch's format")
    unpacked = _unpack_legacy(source)
    return unpacked.storage(unpacked.program.value)


def _storage_id(reference: Any) -> tuple[torch.dtype, str, int]:
    """The dtype, key and length of `("storage", class, key, device, length)`."""
    parts = reference.id if isinstance(reference, Persistent) else None
    if not isinstance(parts, tuple) or len(parts) not in (5, 6) or parts[0] != "storage":
        damaged("a tensor has no storage")
    kind, key, length = parts[1], parts[2], parts[4]
    if not isinstance(kind, Name) or kind.path not in DTYPES:
        damaged("a storage has no known type")
    if not isinstance(key, str) or type(length) is not int or not 0 <= length < 2**48:
        damaged("a storage has no key or no length")
    if len(parts) == 6 and parts[5] is not None:
        damaged("a storage is a view of another one, which torch has not written since version 0.4")
    return DTYPES[kind.path], key, length


def _sized(dtype: torch.dtype, data: bytearray | None, length: int) -> Storage:
    if data is None or len(data) != length * dtype.itemsize:
        damaged(f"a storage does not have the {length * dtype.itemsize} bytes that it is said to have")
    return Storage(dtype, data, length)
