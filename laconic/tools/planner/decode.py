"""Dataclasses from JSON values, by the types of their fields. A value that does not fit is named by its place."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from laconic.values import is_number, is_whole

T = TypeVar("T")


class DecodeError(ValueError):
    """A JSON value that does not fit its type. The message begins with its place."""


def decode(kind: type[T], value: object, place: str = "") -> T:
    """Make a `kind` of a JSON value: a dataclass, a number, a text, None, or a tuple or dict of these.

    >>> decode(tuple[float, ...], [1, 2.5])
    (1.0, 2.5)
    >>> decode(tuple[int, ...], [1, "2"], "bytes")
    Traceback (most recent call last):
    laconic.tools.planner.decode.DecodeError: bytes[1]: it is '2', and must be a whole number
    """
    made: T = _decode(kind, value, place)
    return made


def _decode(kind: Any, value: object, place: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):  # X | None
        inner = next(each for each in arguments if each is not NoneType)
        return None if value is None else _decode(inner, value, place)
    if origin is tuple:
        _check(isinstance(value, list), value, place, "a list")
        return tuple(_decode(arguments[0], each, f"{place}[{i}]") for i, each in enumerate(value))  # type: ignore[arg-type, var-annotated]
    if origin is dict:
        _check(isinstance(value, dict), value, place, "an object")
        return {key: _decode(arguments[1], each, f"{place}.{key}") for key, each in value.items()}  # type: ignore[attr-defined]
    if is_dataclass(kind):
        _check(isinstance(value, dict), value, place, "an object")
        return _dataclass(kind, value, place)  # type: ignore[arg-type]
    if kind is float:
        _check(is_number(value), value, place, "a finite number")
        return float(value)  # type: ignore[arg-type]
    if kind is int:
        _check(is_whole(value, least=None), value, place, "a whole number")
    else:
        _check(isinstance(value, kind), value, place, "text" if kind is str else "true or false")
    return value


def _dataclass(kind: Any, value: dict[str, object], place: str) -> Any:
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}
    for name in value:
        if name not in known:
            raise DecodeError(f"{_inside(place, name)}: there is no such field; known are {', '.join(known)}")
    needed = [name for name, each in known.items() if each.default is MISSING and each.default_factory is MISSING]
    for name in needed:
        if name not in value:
            raise DecodeError(f"{_inside(place, name)}: it is missing")
    given = {name: _decode(hints[name], each, _inside(place, name)) for name, each in value.items()}
    try:
        return kind(**given)
    except ValueError as error:
        raise DecodeError(f"{place}: {error}" if place else str(error)) from None


def _inside(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _check(ok: bool, value: object, place: str, rule: str) -> None:
    if not ok:
        shown = repr(value)
        raise DecodeError(f"{place}: it is {shown if len(shown) < 60 else shown[:60] + '...'}, and must be {rule}")
