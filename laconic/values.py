"""Values that users compose: how they print, and how their arguments are checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from math import isfinite
from typing import Any


def as_code(value: Any) -> str:
    """Return the call that makes a dataclass instance, without arguments that equal their defaults, for `__repr__`."""
    given = {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != default_of(f)}
    return call(type(value).__name__, given)


def call(name: str, given: Mapping[str, object]) -> str:
    """Format a call with keyword arguments.

    >>> call("LowRank", {"rank": 4})
    'LowRank(rank=4)'
    """
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def is_whole(value: object, least: int | None = 1) -> bool:
    """Return whether `value` is an int, not a bool, of at least `least`; None is no limit.

    >>> is_whole(1), is_whole(0), is_whole(-3, least=None), is_whole(2.0), is_whole(True)
    (True, False, True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def is_number(value: object) -> bool:
    """Return whether `value` is a finite int or float, not a bool.

    >>> is_number(2), is_number(-0.5), is_number(float("inf")), is_number("2"), is_number(10**400)
    (True, True, False, False, True)
    """
    return is_whole(value, least=None) or (isinstance(value, float) and isfinite(value))


def default_of(f: Field[Any]) -> Any:
    """Return the default of a dataclass's field."""
    return f.default if f.default_factory is MISSING else f.default_factory()
