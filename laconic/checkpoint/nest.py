"""A nest of state as a tree of JSON and a flat set of tensors, and back.

Numbers, strings, None and lists are themselves. Everything else is an object with one key that says what it is:

    {"lr": 0.1, "betas": (0.9, 0.999), 7: tensor}
    {"items": [["lr", 0.1], ["betas", {"tuple": [0.9, 0.999]}], [7, {"tensor": "7"}]]}

Keys of a nest are any strings, and whole numbers, as optimizers use them. They name tensors in a file, never files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laconic.checkpoint.generation import CheckpointError
from laconic.checkpoint.tensors import AS_BITS, NAMES, RESERVED

MAX_DEPTH = 64
_MAX_BITS = 4096
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_WAY_OUT = "Save dicts, lists, tuples, tensors, strings, numbers, bools and None."

Take = Callable[[str], Tensor]


def encode(nest: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the tree of a nest, and put its tensors into `tensors` by name.

    >>> tensors = {}
    >>> encode({"model": {"a/b": torch.zeros(2)}, "step": 3}, tensors)
    {'dict': {'model': {'dict': {'a/b': {'tensor': 'model/a/b'}}}, 'step': 3}}
    >>> tensors
    {'model/a/b': tensor([0., 0.])}
    """
    return _encode(nest, (), tensors)


def _encode(nest: Any, path: tuple[str | int, ...], tensors: dict[str, Tensor]) -> Any:
    if len(path) > MAX_DEPTH:
        raise TypeError(f"{_shown(path[:4])}... is nested more than {MAX_DEPTH} deep, or holds itself. {_WAY_OUT}")
    if isinstance(nest, Tensor):
        return _put(nest, path, tensors)
    if isinstance(nest, Mapping):
        return _encode_mapping(nest, path, tensors)
    if type(nest) is list:
        return [_encode(each, (*path, index), tensors) for index, each in enumerate(nest)]
    if type(nest) is tuple:
        return {"tuple": [_encode(each, (*path, index), tensors) for index, each in enumerate(nest)]}
    return _encode_plain(nest, path)


def _encode_plain(value: Any, path: tuple[str | int, ...]) -> Any:
    # Exact types: a subclass, such as numpy's float64, would come back as something else.
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int and value.bit_length() <= _MAX_BITS:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise TypeError(f"{_shown(path)} is {_article(kind)}, which a checkpoint does not hold. {_WAY_OUT}")


def _encode_mapping(nest: Mapping[Any, Any], path: tuple[str | int, ...], tensors: dict[str, Tensor]) -> Any:
    for key in nest:
        if type(key) not in (str, int) or (type(key) is int and key.bit_length() > _MAX_BITS):
            raise TypeError(f"{_shown(path)} has the key {key!r}: keys are strings or whole numbers.")
    pairs = [(key, _encode(value, (*path, key), tensors)) for key, value in nest.items()]
    if all(type(key) is str for key in nest):
        return {"dict": dict(pairs)}
    return {"items": [list(pair) for pair in pairs]}


def _put(t: Tensor, path: tuple[str | int, ...], tensors: dict[str, Tensor]) -> Any:
    _check_tensor(t, path)
    plain = "/".join(str(key) for key in path).encode("utf-8", "backslashreplace").decode()
    name, again = plain, 2
    while name in tensors or name == RESERVED:  # {"a": {"b": x}, "a/b": y}
        name, again = f"{plain}#{again}", again + 1
    tensors[name] = t.detach()
    if t.dtype in NAMES:
        return {"tensor": name}
    return {"bits": [name, str(t.dtype).removeprefix("torch."), list(t.shape)]}


def _check_tensor(t: Tensor, path: tuple[str | int, ...]) -> None:
    where = f"{_shown(path)} is a tensor"
    if type(t) not in (Tensor, nn.Parameter):
        raise TypeError(f"{where} of type {type(t).__name__}: plain tensors are saved, such as its to_local().")
    if t.layout is not torch.strided or t.device.type == "meta":
        raise TypeError(f"{where} with layout {t.layout} on {t.device}: dense tensors with data are saved.")
    if t.dtype not in NAMES and t.dtype not in AS_BITS.values():
        raise TypeError(f"{where} of {t.dtype}, which cannot be saved. Convert it, for instance with int_repr().")


def _shown(path: tuple[str | int, ...]) -> str:
    return "state" + "".join(f"[{key!r}]" for key in path)


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def decode(tree: Any, take: Take, depth: int = 0) -> Any:
    """Return the nest of a tree; `take` gives the tensor of a name.

    >>> decode({"dict": {"lr": 0.1, "betas": {"tuple": [0.9, 0.999]}}}, take=lambda name: torch.zeros(2))
    {'lr': 0.1, 'betas': (0.9, 0.999)}
    """
    if depth > MAX_DEPTH:
        raise CheckpointError(f"it is nested more than {MAX_DEPTH} deep, which is not how it was saved.")
    if isinstance(tree, list):
        return [decode(each, take, depth + 1) for each in tree]
    if not isinstance(tree, dict):
        return _finite(tree)
    kind, value = next(iter(tree.items())) if len(tree) == 1 else ("", None)
    if kind == "dict" and isinstance(value, dict):
        return {key: decode(each, take, depth + 1) for key, each in value.items()}
    if kind == "tuple" and isinstance(value, list):
        return tuple(decode(each, take, depth + 1) for each in value)
    if kind == "items" and isinstance(value, list):
        return _decode_items(value, take, depth)
    return _decode_leaf(kind, value, take)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):  # 1e999
        raise CheckpointError("it has a number that is too large for a float.")
    return value


def _decode_leaf(kind: str, value: Any, take: Take) -> Any:
    if kind == "tensor" and isinstance(value, str):
        return take(value)
    if kind == "float" and isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if kind == "bits" and isinstance(value, list) and len(value) == 3:
        return _from_bits(value[0], value[1], value[2], take)
    raise CheckpointError(f"it has an object of unknown kind {kind[:40]!r}.")


def _decode_items(pairs: list[Any], take: Take, depth: int) -> dict[str | int, Any]:
    nest: dict[str | int, Any] = {}
    for pair in pairs:
        key = pair[0] if isinstance(pair, list) and len(pair) == 2 else None
        if not isinstance(key, str | int) or isinstance(key, bool) or key in nest:
            raise CheckpointError("it has a dict whose keys are not strings or whole numbers, each once.")
        nest[key] = decode(pair[1], take, depth + 1)
    return nest


def _from_bits(name: Any, dtype: Any, shape: Any, take: Take) -> Tensor:
    """A tensor of a dtype that safetensors files do not know: it lies there as bytes."""
    if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in AS_BITS:
        raise CheckpointError(f"it has a tensor of unknown dtype {str(dtype)[:40]!r}.")
    if not isinstance(shape, list) or not all(type(each) is int and 0 <= each < 2**63 for each in shape):
        raise CheckpointError(f"it has a tensor of impossible shape {str(shape)[:80]}.")
    bits = take(name)
    if bits.dtype is not torch.uint8 or bits.numel() != math.prod(shape) * AS_BITS[dtype].itemsize:
        raise CheckpointError(f"its tensor {name[:80]!r} does not hold the bytes of {dtype}{shape}.")
    try:
        return bits.view(AS_BITS[dtype]).view(shape)
    except RuntimeError as error:
        raise CheckpointError(f"its tensor {name[:80]!r} cannot have the shape {shape}.") from error
