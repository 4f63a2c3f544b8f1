"""Runs a training on workers of this machine, and reads its outcome."""

from __future__ import annotations

import os
from pathlib import Path

from laconic.session import observers
from laconic.tools.compare.progress import read_progress
from laconic.tools.compare.records import Outcome, read_outcome
from laconic.tools.compare.reporter import FOLDER, has_ended, write_goal
from laconic.tools.compare.settings import Run, Script
from laconic.tools.launch.workers import Network, run_workers

REPORTER = "laconic.tools.compare.reporter:from_env"


def launch(run: Run, folder: Path, network: Network | None = None) -> Outcome:
    """Run all workers to the end and return the outcome. Their progress and their logs go to `folder`."""
    network = network or Network()
    write_goal(folder, run.goal, network.computed)

    def reached(worker: int) -> str:
        reports = read_progress(folder, worker)
        when = f"after step {reports[-1].step}" if reports else "at start"
        return f" {when}, with plan {run.plan}"

    run_workers(
        run.command(folder),
        run.workers,
        folder,
        network,
        title=run.title,
        variables=report_variables(run, folder),
        reached=reached,
        has_ended=lambda worker: isinstance(run, Script) and has_ended(folder, worker),
    )
    return read_outcome(run, folder)


def report_variables(run: Run, folder: Path) -> dict[str, str]:
    """The environment variables that give a script its plan and let it report to `folder`."""
    others = os.environ.get(observers.VARIABLE)
    named = REPORTER if others is None else f"{others},{REPORTER}"
    return {"LACONIC_PLAN": run.plan, FOLDER: str(folder), observers.VARIABLE: named}
