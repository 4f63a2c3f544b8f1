"""Numbers with units: as a user writes them, and as people read them.

parse("250ms", DURATION, "--step")      0.25 seconds
counted("2 @ 1gbit", RATE, "--link")    2, and 1e9 bits per second
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from laconic.tools.errors import UsageError

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_NUMBER = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\d\s.]*)")


@dataclass(frozen=True)
class Quantity:
    """What a number may end with, the smallest value, and what a mistake is answered with."""

    scales: dict[str, float]
    hint: str
    least: float = 0.0
    """0 for any number above 0."""


DURATION = Quantity(
    {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0},
    "a duration of more than 0, such as 250ms, 1.5s, 38min or 12h",
)
RATE = Quantity(
    {
        f"{text}{unit}": value * bits
        for scale, value in _SCALES.items()
        for text in (scale, scale.upper())
        for unit, bits in {"bit": 1, "bit/s": 1, "bps": 1, "b/s": 1, "B/s": 8}.items()
    },
    "a rate of at least 1kbit: a number and a unit, such as 100mbit, 1.5gbit or 6MB/s (bytes)",
    least=1000.0,
)
COUNT = Quantity(
    {text: value for scale, value in {**_SCALES, "b": 1e9}.items() for text in (scale, scale.upper())},
    "a number of at least 1, such as 30846720, 350M or 1.5B",
    least=1.0,
)


def parse(text: str, unit: Quantity, option: str) -> float:
    """Read a number with a unit.

    >>> parse("250ms", DURATION, "--step"), parse("350M", COUNT, "--parameters")
    (0.25, 350000000.0)
    >>> [parse(text, DURATION, "--step") for text in (".8s", "8.e-1s", "8E+2 ms")]
    [0.8, 0.8, 0.8]
    >>> parse("6MB/s", RATE, "--link")
    48000000.0
    >>> parse("fast", RATE, "--link")
    Traceback (most recent call last):
    laconic.tools.errors.UsageError: --link fast: write a rate of at least 1kbit: ...
    """
    match = _NUMBER.fullmatch(text.strip())
    found = float(match[1]) * unit.scales.get(match[2], 0.0) if match else 0.0
    if found <= 0 or found < unit.least:
        raise UsageError(f"{option} {text}: write {unit.hint}.")
    return found


def counted(text: str, unit: Quantity, option: str) -> tuple[int, float]:
    """Read how many, an @, and a number with a unit.

    >>> counted("2 @ 1gbit", RATE, "--link")
    (2, 1000000000.0)
    """
    count, at, value = (piece.strip() for piece in text.partition("@"))
    if not at or not count.isdecimal() or int(count) < 1:
        raise UsageError(f"{option} {text}: write a number of at least 1, an @, and {unit.hint}.")
    return int(count), parse(value, unit, f"{option} {count} @")


def rate_text(bits_per_s: float, digits: int = 6) -> str:
    """A rate, as `parse` reads it.

    >>> rate_text(5e7), rate_text(1.5e9), rate_text(9_612_345.0, digits=3)
    ('50mbit', '1.5gbit', '9.61mbit')
    >>> rate_text(inf)  # of a link on which more bytes took no more time
    'more than was measurable'
    """
    if bits_per_s == inf:
        return "more than was measurable"
    for name, scale in reversed(_SCALES.items()):
        if bits_per_s >= scale:
            return f"{bits_per_s / scale:.{digits}g}{name}bit"
    return f"{bits_per_s:.{digits}g}bit"


def duration(seconds: float) -> str:
    """A duration: parts of a second in three digits, else minutes and seconds.

    >>> duration(4.56e-5), duration(0.0123), duration(8.25), duration(41.3), duration(235)
    ('45.6 us', '12.3 ms', '8.2 s', '41 s', '3 min 55 s')
    """
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 or not seconds else f"{seconds * 1e6:.3g} us"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{rest} s" if not minutes else f"{minutes} min {rest} s" if rest else f"{minutes} min"


def human_bytes(count: float) -> str:
    """A number of bytes in three digits.

    >>> [human_bytes(n) for n in (999, 3_276_800, 629_145_600)]
    ['999 B', '3.28 MB', '629 MB']
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def ratio(first: float, other: float) -> str:
    """The ratio of `first` to `other`, or "-" if `other` is 0.

    >>> ratio(1000, 31), ratio(1000, 1000), ratio(31, 1000), ratio(1000, 0)
    ('32.3x', '1.0x', '0.031x', '-')
    """
    if not other:
        return "-"
    return f"{first / other:.1f}x" if first >= other else f"{first / other:.2g}x"


def times(more: float, less: float) -> str:
    """The ratio of two numbers, in words.

    >>> times(100, 8), times(100, 67)
    ('12 times', '1.5 times')
    """
    ratio = more / less
    return f"{ratio:.0f} times" if ratio >= 10 else f"{ratio:.1f} times"


def percent(value: float | None) -> str:
    """A share in percent; "-" if it is unknown or not a number.

    >>> percent(0.857), percent(-0.2), percent(None), percent(float("nan"))
    ('86%', '-20%', '-', '-')
    """
    return "-" if value is None or value != value else f"{value:.0%}"


def listed(words: Sequence[str]) -> str:
    """Words as a list in a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return ", ".join(words[:-1]) + " and " * (len(words) > 1) + words[-1] if words else ""
