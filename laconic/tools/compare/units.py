"""Numbers with units, for people."""

from collections.abc import Sequence


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


def duration(seconds: float) -> str:
    """A duration in minutes and seconds.

    >>> duration(8.25), duration(41.3), duration(235)
    ('8.2 s', '41 s', '3 min 55 s')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{rest} s" if not minutes else f"{minutes} min {rest} s" if rest else f"{minutes} min"


def share(value: float | None) -> str:
    """A share in percent; "-" if it is unknown or not a number.

    >>> share(0.857), share(-0.2), share(None), share(float("nan"))
    ('86%', '-20%', '-', '-')
    """
    return "-" if value is None or value != value else f"{value:.0%}"


def listed(words: Sequence[str]) -> str:
    """Words as a list in a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return ", ".join(words[:-1]) + " and " * (len(words) > 1) + words[-1] if words else ""
