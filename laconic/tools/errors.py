"""The user's mistake, as all commands report it: one paragraph that says what was written, the rule and the way out."""

from __future__ import annotations

from pathlib import Path

from laconic.values import is_number, is_whole


class UsageError(ValueError):
    """A mistake in what the user asked for. The message is ready to be shown."""


def check_count(name: str, value: int | None) -> None:
    """Refuse a count below 1. None is not set."""
    if value is not None and not is_whole(value):
        option = f"--{name.replace('_', '-')}"
        raise UsageError(f"{option} {value}: there must be at least 1. Use {option} 1 or more.")


def check_positive(name: str, value: float | None) -> None:
    """Refuse a number that is not finite and above 0. None is not set."""
    if value is not None and not (is_number(value) and value > 0):
        raise UsageError(
            f"--{name.replace('_', '-')} {value:g}: it must be a number above 0. Leave it out for the default."
        )


def check_script(path: Path) -> None:
    """Refuse a script that does not exist."""
    if not path.is_file():
        raise UsageError(f"--script {path}: there is no such file. Give the path of a training script.")
