"""A prediction beside what a run measured: the error of each term."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from laconic.tools.errors import UsageError
from laconic.tools.planner.predict import Prediction

NEEDED = ("plan", "steps", "seconds", "wire_bytes", "communication_seconds", "parameters", "workers")


@dataclass(frozen=True)
class FinishedRun:
    """What is used of a finished run, of one worker."""

    plan: str
    steps: int
    seconds: float
    wire_bytes: int
    communication_seconds: float
    parameters: int
    workers: int
    without_link: bool = False


@dataclass(frozen=True)
class Term:
    """One term of a prediction: per step, predicted and measured."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float | None:
        """The error relative to what was measured; None if that is 0.

        >>> Term("step, s", predicted=0.9, measured=1.0).error
        -0.1
        """
        return None if not self.measured else round(self.predicted / self.measured - 1, 9)


def finished_runs(path: Path) -> list[FinishedRun]:
    """Read the runs of a file that `laconic compare --json` or `train --json` has written."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--check {path}: it cannot be read as JSON ({error}).") from error
    if not isinstance(found, list) or not all(isinstance(run, dict) and set(NEEDED) <= set(run) for run in found):
        raise UsageError(
            f"--check {path}: this is not the result of a run. Give a file that compare --json has written."
        )
    return [
        FinishedRun(**{key: run[key] for key in NEEDED}, without_link=bool(run.get("without_link"))) for run in found
    ]


def terms(prediction: Prediction, run: FinishedRun) -> Sequence[Term]:
    """Compare a prediction with a run, term by term."""
    talking = sum(sent.seconds(prediction.scenario.network) for sent in prediction.sent)
    return (
        Term("sent by each, bytes", prediction.sent_bytes_per_step, run.wire_bytes / run.steps),
        Term("collectives in flight, s", talking / prediction.cycle, run.communication_seconds / run.steps),
        Term("step, s", prediction.step_s, run.seconds / run.steps),
    )
