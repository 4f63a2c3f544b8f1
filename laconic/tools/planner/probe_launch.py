"""Starts the workers of a probe on this machine, on hosts of their own if there is a link, with compare's launcher.

This file is also the program of a worker: `python -m laconic.tools.planner.probe_launch FOLDER`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

from laconic.tools.compare.running import launch
from laconic.tools.compare.runs import Goal, Run
from laconic.tools.launch.failures import WorkerError
from laconic.tools.launch.folders import run_folder
from laconic.tools.launch.tail import following
from laconic.tools.launch.workers import Network, python, run_workers
from laconic.tools.planner.decode import decode
from laconic.tools.planner.probe import ProbeOptions, Show, process_group, run_probe
from laconic.tools.planner.probe_data import Probe, StepTiming

PROGRESS = "progress.jsonl"
STEPS, STEPS_S, WARM_UP_STEPS = 60, 15.0, 3
"""Of a script: how many steps it is asked for, in how many seconds, and how many do not count."""


def launch_probe(options: ProbeOptions, workers: int, network: Network, show: Show) -> Probe:
    """Start workers, and return what they have measured."""
    with run_folder() as folder:
        (folder / "options.json").write_text(json.dumps(asdict(options)))
        with following([folder / PROGRESS], lambda line: show(*json.loads(line))):
            run_workers(python("-m", __name__, str(folder)), workers, folder, network, title="the probe")
        return Probe.read(folder / "probe.json")


def script_step(run: Run, network: Network) -> StepTiming:
    """Run a user's script, whose plan is alone(), for a few steps, and return the seconds of worker 0's."""
    with run_folder() as folder:
        points = launch(replace(run, goal=Goal(STEPS, STEPS_S)), folder, network).curve
    took = [(b.seconds - a.seconds) / (b.step - a.step) for a, b in pairwise(points[WARM_UP_STEPS:])]
    found = tuple(each for each in took if each > 0)
    if not found:
        raise WorkerError(
            f"{run.training.title}: it ended after {len(points)} reports, and more than {WARM_UP_STEPS + 1} "
            f"are needed. Let it train for {STEPS} steps."
        )
    return StepTiming(found)


def _main(folder: Path) -> None:
    options = decode(ProbeOptions, json.loads((folder / "options.json").read_text()))
    with process_group(options.device):
        first = os.environ["RANK"] == "0"
        with (folder / PROGRESS if first else Path(os.devnull)).open("w", buffering=1) as progress:
            probe = run_probe(options, lambda done, text: print(json.dumps([done, text]), file=progress))
        if first:
            probe.write(folder / "probe.json")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
    sys.stdout.flush()
    # A thread of gloo may release its last tensor only now, and abort an interpreter that shuts down (torch 2.13).
    os._exit(0)
