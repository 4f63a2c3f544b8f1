"""What the functions of `laconic.checkpoint` return and raise."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is damaged."""


@dataclass(frozen=True)
class Checkpoint:
    """One saved step of all workers.

    >>> Checkpoint(42, Path("run/step-00000042"), workers=2)
    Checkpoint(step=42, path=...('run/step-00000042'), workers=2, problem='')
    """

    step: int
    path: Path
    workers: int | None = None
    """How many workers saved it; None if the manifest cannot be read."""
    problem: str = ""
    """What is wrong with it; empty if nothing is."""

    @property
    def good(self) -> bool:
        """Whether no problem was found."""
        return not self.problem


@dataclass(frozen=True)
class Loaded:
    """The state of one worker, as it was saved."""

    state: Any = field(repr=False)
    step: int
    worker: int
    workers: int
    """How many workers saved this checkpoint."""
    skipped: tuple[Checkpoint, ...] = ()
    """Newer checkpoints that were rejected, each with its problem."""
