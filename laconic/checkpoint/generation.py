"""What a folder of checkpoints holds, as values: a generation, a loaded state, and the error that says what is off."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or cannot be trusted.

    The message names the file, what was found, the rule, and the way out. `skipped` are the generations that a search
    for a good one passed over.
    """

    def __init__(self, message: str, skipped: tuple[Generation, ...] = ()) -> None:
        super().__init__(message)
        self.skipped = skipped


@dataclass(frozen=True)
class Generation:
    """One saved step: whether it is good, and if not, why.

    >>> Generation(42, Path("run/step-00000042"), workers=2)
    Generation(step=42, path=...('run/step-00000042'), workers=2, problem='')
    """

    step: int
    path: Path
    workers: int | None = None
    """How many workers saved it; None where that cannot be read."""
    problem: str = ""
    """What is wrong with it; empty if nothing is."""

    @property
    def good(self) -> bool:
        """Whether nothing is known to be wrong with it."""
        return not self.problem


@dataclass(frozen=True)
class Loaded:
    """One worker's state, as it was saved."""

    state: Any = field(repr=False)
    step: int
    worker: int
    workers: int
    """How many workers saved this generation."""
    skipped: tuple[Generation, ...] = ()
    """Newer generations that were passed over, each with its problem."""
