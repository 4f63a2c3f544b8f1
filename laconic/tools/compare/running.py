"""Runs a training on workers of this machine, or as one of torchrun's, and reads its outcome."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from laconic.session import observers
from laconic.tools.compare.records import Outcome, has_ended, read_outcome, read_reports
from laconic.tools.compare.reporter import FOLDER, write_goal
from laconic.tools.compare.runs import Script, TrainingRun
from laconic.tools.errors import UsageError
from laconic.tools.lab import script as lab
from laconic.tools.launch.workers import WorkerNetwork, run_workers, variables

REPORTER = "laconic.tools.compare.reporter:from_env"


def launch(run: TrainingRun, folder: Path, network: WorkerNetwork | None = None) -> Outcome:
    """Run all workers to the end and return the outcome. Their reports and their logs go to `folder`."""
    network = network or WorkerNetwork()
    write_goal(folder, run.goal, network.computed)

    def reached(worker: int) -> str:
        reports = read_reports(folder, worker)
        return f" {f'after step {reports[-1].step}' if reports else 'at start'}, with plan {run.plan}"

    before = network.uplink_bytes()
    run_workers(
        run.training.command(run.goal.steps),
        run.workers,
        folder,
        network,
        title=run.training.title,
        variables=report_variables(run, folder),
        reached=reached,
        has_ended=lambda worker: has_ended(folder, worker),
    )
    return replace(
        read_outcome(run, folder),
        link=None if network.link is None else str(network.link),
        clock=network.clock,
        uplink_bytes={name: count - before[name] for name, count in network.uplink_bytes().items()},
        settings=describe(run, network),
    )


def run_in_place(run: TrainingRun, folder: Path, worker: int) -> Outcome | None:
    """Run the lab's script in this process, which is a worker of torchrun's. Only worker 0 has an outcome."""
    if isinstance(run.training, Script):
        raise UsageError(f"{run.training.title}: torchrun runs the lab's training alone. Run laconic without torchrun.")
    write_goal(folder, run.goal, computed=None)
    with variables(report_variables(run, folder)):
        lab.main(run.training.arguments(run.goal.steps))
    return read_outcome(run, folder, only_worker=0) if worker == 0 else None


def report_variables(run: TrainingRun, folder: Path) -> dict[str, str]:
    """The environment variables that give a script its plan and let it report to `folder`."""
    others = os.environ.get(observers.VARIABLE)
    named = REPORTER if others is None else f"{others},{REPORTER}"
    return {"LACONIC_PLAN": repr(run.plan), FOLDER: str(folder), observers.VARIABLE: named}


def describe(run: TrainingRun, network: WorkerNetwork) -> str:
    """The settings that the results of a run depend on, as text."""
    return f"{run!r}, {network.clock} link: {network.link}"
