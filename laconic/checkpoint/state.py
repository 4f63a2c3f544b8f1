"""A nested state as a JSON skeleton and a flat dict of tensors, and the two joined again.

Lists, strings, finite numbers, bools and None are themselves. Everything else is an object with one key, its kind:

    {"lr": 0.1, "betas": (0.9, 0.999), 7: tensor}
    {"dict": [["lr", 0.1], ["betas", {"tuple": [0.9, 0.999]}], [7, {"tensor": "7"}]]}

Keys are strings or, as in optimizers, ints. They name tensors inside a file and never become file names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

MAX_DEPTH = 64
_ALLOWED = "Save dicts, lists, tuples, tensors, strings, numbers, bools and None."


def _named(names: str) -> dict[str, torch.dtype]:
    return {name: getattr(torch, name) for name in names.split()}


NATIVE_DTYPES = _named(
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
)
"""Dtypes that safetensors holds."""

AS_BYTES = _named("complex32 complex128 float4_e2m1fn_x2")
"""Dtypes that are stored as uint8."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dense(t: Tensor) -> Tensor:
    """Return a contiguous tensor on the CPU; a copy only if `t` is not one."""
    return t.detach().resolve_conj().resolve_neg().cpu().contiguous()


def as_bytes(t: Tensor) -> Tensor:
    """Return the bytes of a tensor on the CPU, as uint8 of shape [bytes]."""
    return dense(t).as_strided((t.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


def copy_to_host(t: Tensor) -> Tensor:
    """Copy a tensor to the CPU, contiguous, so that training can change the original."""
    return t.detach().resolve_conj().resolve_neg().to("cpu", copy=True, memory_format=torch.contiguous_format)


def describe(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return the dtype and shape of each tensor of `flatten`, for JSON."""
    return {name: [dtype_name(t.dtype), list(t.shape)] for name, t in tensors.items()}


def allocate(described: Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
    """Make tensors of zeros from what `describe` returned."""
    return {name: torch.zeros(shape, dtype=NATIVE_DTYPES[dtype]) for name, (dtype, shape) in described.items()}


def flatten(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return the JSON skeleton of a state, and its tensors by name.

    Tensors are not copied, but those of the dtypes in `AS_BYTES` are returned as uint8.

    >>> flatten({"model": {"a/b": torch.zeros(2)}, "step": 3})
    ({'dict': [['model', {'dict': [['a/b', {'tensor': 'model/a/b'}]]}], ['step', 3]]}, {'model/a/b': tensor([0., 0.])})
    """
    return _flatten(state, (), tensors := dict[str, Tensor]()), tensors


def _flatten(value: Any, path: tuple[str | int, ...], tensors: dict[str, Tensor]) -> Any:
    if len(path) > MAX_DEPTH:
        raise TypeError(f"{_shown(path[:4])}... is nested more than {MAX_DEPTH} deep, or contains itself. {_ALLOWED}")
    if isinstance(value, Tensor):
        return _add(value, path, tensors)
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{_shown(path)} has the key {key!r}: keys must be strings or ints.")
        return {"dict": [[key, _flatten(item, (*path, key), tensors)] for key, item in value.items()]}
    # Exact types: a subclass, such as numpy's float64, would be loaded as another type.
    if type(value) in (list, tuple):
        items = [_flatten(item, (*path, index), tensors) for index, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if type(value) is float and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise TypeError(f"{_shown(path)} has the type {kind}, which a checkpoint does not hold. {_ALLOWED}")


def _add(t: Tensor, path: tuple[str | int, ...], tensors: dict[str, Tensor]) -> Any:
    dtype, plain = dtype_name(t.dtype), type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided
    if not plain or t.device.type == "meta" or dtype not in NATIVE_DTYPES | AS_BYTES:
        raise TypeError(
            f"{_shown(path)} is a {type(t).__name__} of {t.dtype} with layout {t.layout} on {t.device}, which a "
            "checkpoint does not hold. Save a dense tensor with data, such as its to_local(), to_dense() or int_repr()."
        )
    name = "/".join(map(str, path)).encode("utf-8", "backslashreplace").decode()
    while name in tensors or name == "__metadata__":  # {"a": {"b": x}, "a/b": y}; safetensors reserves __metadata__
        name += "#"
    tensors[name] = t.detach() if dtype in NATIVE_DTYPES else as_bytes(t)
    return {"tensor": name} if dtype in NATIVE_DTYPES else {"bytes": [name, dtype, list(t.shape)]}


def _shown(path: tuple[str | int, ...]) -> str:
    return "state" + "".join(f"[{key!r}]" for key in path)


def unflatten(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state of a skeleton and its tensors by name. Nothing in a skeleton can run.

    A skeleton that `flatten` did not make is a ValueError, KeyError, TypeError or RuntimeError.

    >>> unflatten({"dict": [["lr", 0.1], ["betas", {"tuple": [0.9, 0.999]}]]}, tensors={})
    {'lr': 0.1, 'betas': (0.9, 0.999)}
    """
    if isinstance(skeleton, list):
        return [unflatten(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, value),) = skeleton.items()
    match kind:
        case "dict":
            return {key: unflatten(item, tensors) for key, item in value}
        case "tuple":
            return tuple(unflatten(item, tensors) for item in value)
        case "tensor":
            return tensors[value]
        case "bytes":
            name, dtype, shape = value
            return tensors[name].view(AS_BYTES[dtype]).view(shape)
        case "float":
            return float(value)
    raise ValueError(f"a value of the unknown kind {kind!r}")
