"""A user's own training script, run once with each plan.

Any script that torchrun can start works, if it attaches `laconic.plan_from_env()` and calls `session.report(loss=...)`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import laconic
from laconic.compare.progress import Goal
from laconic.compare.settings import LabError, Settings, check_count, check_positive


@dataclass(frozen=True)
class Script:
    """One run of a user's script."""

    plan: str
    script: Path
    arguments: tuple[str, ...] = ()
    workers: int = 4
    steps: int | None = None
    seconds: float | None = None
    until_loss: float | None = None

    def __post_init__(self) -> None:
        laconic.plan(self.plan)
        check_count("workers", self.workers)
        check_count("steps", self.steps)
        check_positive("seconds", self.seconds)
        check_positive("until_loss", self.until_loss)
        if not self.script.is_file():
            raise LabError(f"--script {self.script}: there is no such file. Give the path of a training script.")

    @property
    def title(self) -> str:
        """What error messages call the run."""
        return f"--script {self.script}"

    @property
    def goal(self) -> Goal:
        """When `session.report` returns True."""
        return Goal(self.steps, self.seconds, self.until_loss)

    def command(self, folder: Path) -> list[str]:
        """The command of a worker."""
        return [sys.executable, str(self.script), *self.arguments]

    def results(self, folder: Path) -> dict[str, Any]:
        """The fields of the outcome that are known without reports."""
        return {"model": self.script.name}


Run = Settings | Script
