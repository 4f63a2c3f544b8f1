"""The progress of a run: JSON lines that each worker writes to its own file, and that the launching process reads."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from laconic.tools.launch.tail import Tail

VALIDATE_EVERY = 5
"""Reports from one validation to the next, where the script gives a function for it."""

Ending = Literal["", "steps", "seconds", "loss"]


@dataclass(frozen=True)
class Goal:
    """When a run ends: at the first of these that it reaches. None sets no limit. And how often it is validated."""

    steps: int | None = None
    seconds: float | None = None
    loss: float | None = None
    validate_every: int = VALIDATE_EVERY


@dataclass(frozen=True)
class Progress:
    """The state of one worker after a step. All numbers are this worker's.

    `steps` and `seconds_limit` are the limits of the run, 0 for none. `seconds` includes `link_s`, the computed time of
    the link; `communication_s` is the part of it during which a collective was in flight. `level_bytes` are the
    `wire_bytes` of each level. `ended` is the limit that ended the run. `validation` is the validation loss of all
    workers, at the steps that have one. `residual` and `agreement` are what a guard measured last (`laconic.Health`).

    >>> now = Progress(worker=0, step=50, steps=200, loss=2.5, tokens_per_s=1e4, sent_bytes=8, seconds=10.0)
    >>> now.seconds_left
    30.0
    """

    worker: int
    step: int
    steps: int
    loss: float
    tokens_per_s: float
    sent_bytes: int
    seconds: float
    wire_bytes: int = 0
    framing_bytes: int = 0
    interface_bytes: int | None = None
    communication_s: float = 0.0
    link_s: float = 0.0
    level_bytes: dict[str, int] = field(default_factory=dict)
    seconds_limit: float = 0.0
    ended: Ending = ""
    validation: float | None = None
    residual: float | None = None
    agreement: float | None = None

    @property
    def seconds_left(self) -> float:
        """Estimate of the remaining time; 0 if the run has no limit."""
        if self.ended:
            return 0.0
        left = [self.seconds / self.step * (self.steps - self.step)] if self.steps else []
        left += [self.seconds_limit - self.seconds] if self.seconds_limit else []
        return max(0.0, min(left, default=0.0))


def progress_file(folder: Path, worker: int) -> Path:
    """The file to which a worker writes its progress."""
    return folder / f"worker-{worker}.jsonl"


def read_progress(folder: Path, worker: int) -> list[Progress]:
    """What a worker has written, in order."""
    return [Progress(**json.loads(line)) for line in Tail(progress_file(folder, worker)).read()]
