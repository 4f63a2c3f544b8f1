"""From the plain data of a pickle to a checked `PickledState`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.torch_pickle.container import Storage, Unpacked, unpack
from laconic.torch_pickle.machine import Record, as_bytes, damaged
from laconic.torch_pickle.names import POWER_SGD

LIMIT_BYTES = 64 * 2**30
MAX_DIMENSIONS = 16
_KEY_WORDS = 624


@dataclass(frozen=True)
class RandomStream:
    """The state of numpy's `RandomState`: a Mersenne Twister's, and a Gaussian in reserve."""

    key: tuple[int, ...]
    position: int
    has_gauss: int
    cached_gaussian: float

    def for_numpy(self) -> tuple[str, np.ndarray[Any, Any], int, int, float]:
        """What `numpy.random.RandomState.set_state` takes."""
        key = np.array(self.key, dtype=np.uint32)
        return "MT19937", key, self.position, self.has_gauss, self.cached_gaussian


@dataclass(frozen=True, eq=False)
class PickledState:
    """All that torch's `PowerSGDState` saves, under torch's names; tensors by bucket index, on the CPU."""

    matrix_approximation_rank: int
    start_powerSGD_iter: int
    min_compression_rate: float
    orthogonalization_epsilon: float
    use_error_feedback: bool
    warm_start: bool
    iter: int
    total_numel_before_compression: int
    total_numel_after_compression: int
    compression_stats_logging_frequency: int
    next_stats_report: int
    rng: RandomStream
    error_dict: Mapping[int, Tensor]
    p_memory_dict: Mapping[int, Tensor]
    q_memory_dict: Mapping[int, Tensor]
    batch_tensors_with_same_shape: bool = field(default=False)
    """torch before 1.13 did not have it."""


def read_power_sgd_state(source: str | os.PathLike[str] | bytes, *, limit_bytes: int = LIMIT_BYTES) -> PickledState:
    """The one `PowerSGDState` in a file or its bytes, whatever else a checkpoint holds; no code of it is run.

    Raises `UnsafePickleError` if the file asks for anything that a saved state does not need, `ValueError` if
    it is damaged, longer than `limit_bytes` or holds no state or several, `OSError` if it cannot be read.
    """
    data = source if isinstance(source, bytes) else _contents(Path(source), limit_bytes)
    if len(data) > limit_bytes:
        raise ValueError(_too_long(len(data), limit_bytes))
    unpacked = unpack(data)
    states = [record for record in unpacked.program.records if record.name == f"{POWER_SGD}.PowerSGDState"]
    if len(states) != 1:
        raise ValueError(
            f"the file holds {len(states)} PowerSGDState objects; exactly one can be read. "
            "Save the one that is wanted by itself: torch.save(state, path)."
        )
    return _state(states[0], _Tensors(unpacked, budget_bytes=len(data)))


def _contents(path: Path, limit_bytes: int) -> bytes:
    size_bytes = path.stat().st_size
    if not path.is_file():
        raise ValueError(f"{path} is not a file. Give the file that torch.save or pickle.dump wrote.")
    if size_bytes > limit_bytes:
        raise ValueError(_too_long(size_bytes, limit_bytes))
    return path.read_bytes()


def _too_long(size_bytes: int, limit_bytes: int) -> str:
    return (
        f"the file has {size_bytes} bytes; at most {limit_bytes} are read. "
        f"If it is trusted to be a state, pass limit_bytes={size_bytes}."
    )


def _state(record: Record, tensors: _Tensors) -> PickledState:
    saved = record.state
    if not isinstance(saved, dict):
        damaged("its PowerSGDState has no fields")
    known = {each.name: each for each in fields(PickledState)}
    missing = [name for name in known if name not in saved and name != "batch_tensors_with_same_shape"]
    unknown = [str(name)[:60] for name in saved if name not in known]
    if missing or unknown:
        damaged(f"its PowerSGDState lacks {missing} and has in addition {unknown[:5]}")
    readers: dict[str, Callable[[str, Any], Any]] = {
        "int": _whole_number,
        "float": _number,
        "bool": _truth,
        "RandomStream": _random_stream,
        "Mapping[int, Tensor]": tensors.by_bucket,
    }
    return PickledState(**{name: readers[str(known[name].type)](name, value) for name, value in saved.items()})


def _whole_number(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        damaged(f"its {name} is not a whole number from 0 up")
    return value


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        damaged(f"its {name} is not a finite number from 0 up")
    return float(value)


def _truth(name: str, value: Any) -> bool:
    if type(value) is not bool:
        damaged(f"its {name} is not True or False")
    return value


def _random_stream(name: str, value: Any) -> RandomStream:
    """From `{"bit_generator": "MT19937", "state": {"key": array, "pos": 0}, "has_gauss": 0, "gauss": 0.0}`."""
    saved = value.state if isinstance(value, Record) else None
    inner = saved.get("state") if isinstance(saved, dict) else None
    if not isinstance(saved, dict) or not isinstance(inner, dict) or saved.get("bit_generator") != "MT19937":
        damaged(f"its {name} is not the state of a numpy RandomState")
    gauss = saved.get("gauss")
    if type(gauss) is not float or not math.isfinite(gauss):
        damaged(f"its {name} has a Gaussian in reserve that is not a number")
    position = _whole_number(f"{name}'s position", inner.get("pos"))
    has_gauss = _whole_number(f"{name}'s has_gauss", saved.get("has_gauss"))
    if position > _KEY_WORDS or has_gauss > 1:
        damaged(f"its {name} is not the state of a Mersenne Twister")
    return RandomStream(_key(inner.get("key")), position, has_gauss, gauss)


def _key(array: Any) -> tuple[int, ...]:
    """The key's bytes, in either of the two ways in which numpy pickles an array."""
    order, raw = "<", b""
    if isinstance(array, Record) and array.name.endswith("._frombuffer") and len(array.args) == 4:
        order, raw = _byte_order(array.args[1]), array.args[0]
    elif isinstance(array, Record) and isinstance(array.state, tuple) and len(array.state) == 5:
        order, raw = _byte_order(array.state[2]), array.state[4]
    raw = as_bytes(raw)
    if len(raw) != 4 * _KEY_WORDS:
        damaged(f"its rng's key is not an array of {_KEY_WORDS} words")
    return tuple(int(word) for word in np.frombuffer(raw, dtype=f"{order}u4"))


def _byte_order(dtype: Any) -> str:
    """Of `numpy.dtype("u4")` with its state `(3, "<", ...)`."""
    is_u4 = isinstance(dtype, Record) and dtype.name == "numpy.dtype" and dtype.args[:1] == ("u4",)
    if not is_u4 or not isinstance(dtype.state, tuple) or len(dtype.state) < 2 or dtype.state[1] not in ("<", ">"):
        damaged("its rng's key is not of 32-bit words")
    return str(dtype.state[1])


class _Tensors:
    """Makes tensors of records, at most as many bytes of them as the file has."""

    def __init__(self, unpacked: Unpacked, budget_bytes: int) -> None:
        self.storage = unpacked.storage
        self.left_bytes = budget_bytes

    def by_bucket(self, name: str, value: Any) -> dict[int, Tensor]:
        if not isinstance(value, dict) or any(type(bucket) is not int or bucket < 0 for bucket in value):
            damaged(f"its {name} is not a dict by bucket index")
        return {bucket: self.tensor(name, record) for bucket, record in value.items()}

    def tensor(self, name: str, record: Any) -> Tensor:
        if not isinstance(record, Record) or record.name != "torch._utils._rebuild_tensor_v2":
            damaged(f"its {name} holds something that is no tensor")
        if len(record.args) not in (6, 7):
            damaged(f"its {name} holds a tensor with {len(record.args)} parts")
        storage = self.storage(record.args[0])
        offset, size, stride = _layout(record.args[1:4], storage.length)
        self.left_bytes -= math.prod(size) * storage.dtype.itemsize
        if self.left_bytes < 0:
            damaged("its tensors share storages, and together are longer than the file")
        return _strided(storage, offset, size, stride)


def _layout(parts: tuple[Any, ...], length: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Offset, size and stride, all inside a storage of `length` elements."""
    offset, size, stride = parts
    if not _are_counts((offset,)) or not _are_counts(size) or not _are_counts(stride):
        damaged("a tensor's offset, size or stride is not of whole numbers from 0 up")
    if len(size) != len(stride) or len(size) > MAX_DIMENSIONS:
        damaged(f"a tensor has {len(size)} sizes and {len(stride)} strides")
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    is_empty = math.prod(size) == 0
    if math.prod(size) > length or (is_empty and offset > length) or (not is_empty and last >= length):
        damaged(f"a tensor of size {size} at offset {offset} does not fit its storage of {length} elements")
    return offset, size, stride


def _are_counts(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and 0 <= value < 2**48 for value in values)


def _strided(storage: Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    if math.prod(size) == 0:
        return torch.empty(size, dtype=storage.dtype)
    flat = torch.frombuffer(storage.data, dtype=storage.dtype)
    return flat.as_strided(size, stride, offset).clone()
