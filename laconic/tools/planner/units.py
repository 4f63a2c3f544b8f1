"""Durations and amounts of bytes that a user writes."""

from __future__ import annotations

import re

from laconic.tools.errors import UsageError

_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}


def seconds_of(text: str, option: str) -> float:
    """Read a duration.

    >>> seconds_of("250ms", "--step"), seconds_of("38min", "--step")
    (0.25, 2280.0)
    """
    return _read(text, option, _SECONDS, "a duration of more than 0, such as 250ms, 1.5s, 38min or 12h")


def bytes_of(text: str, option: str) -> float:
    """Read an amount of bytes.

    >>> bytes_of("1.5GB", "--budget")
    1500000000.0
    """
    return _read(text.lower(), option, _BYTES, "an amount of more than 0, such as 500MB or 2TB")


def _read(text: str, option: str, units: dict[str, float], what: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*([a-z]+)", text.strip())
    found = float(match[1]) * units.get(match[2], 0.0) if match else 0.0
    if found <= 0:
        raise UsageError(f"{option} {text}: write {what}.")
    return found


def shares_of(text: str, option: str) -> list[float]:
    """Read percentages.

    >>> shares_of("50,99", "--need")
    [0.5, 0.99]
    """
    try:
        found = [float(part) / 100 for part in text.replace("%", "").split(",")]
    except ValueError:
        found = [0.0]
    if not all(0 < share < 1 for share in found):
        raise UsageError(f"{option} {text}: write percentages between 0 and 100, such as 50,80,95.")
    return found
