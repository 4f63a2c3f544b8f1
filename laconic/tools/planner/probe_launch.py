"""Starts the workers of a probe on this machine, on hosts of their own if there is a link, with compare's launcher.

This file is also the program of a worker: `python -m laconic.tools.planner.probe_launch FOLDER`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from laconic.tools.compare.settings import Script, path_option
from laconic.tools.launch.failures import WorkerError, keep_logs, killed_by, last_error, last_traceback, read_log
from laconic.tools.launch.folders import run_folder
from laconic.tools.launch.launch import Network, environment, launch, run_elastic
from laconic.tools.launch.slow_link import PROGRAM
from laconic.tools.planner.decode import decode
from laconic.tools.planner.probe import ProbeOptions, Show, process_group, run_probe
from laconic.tools.planner.probe_data import Probe, StepTiming

READ_EVERY_S = 0.1
STEPS, STEPS_S, WARM_UP_STEPS = 60, 15.0, 3
"""Of a script: how many steps it is asked for, in how many seconds, and how many do not count."""


def launch_probe(options: ProbeOptions, workers: int, network: Network, show: Show) -> Probe:
    """Start workers, and return what they have measured."""
    hosts = json.dumps(None if network.slow is None else asdict(network.slow.hosts))
    with run_folder() as folder:
        (folder / "options.json").write_text(json.dumps(asdict(options)))
        command = (str(PROGRAM), "enter", hosts, sys.executable, *path_option(), "-m", __name__, str(folder))
        try:
            with environment({}, workers, hosts=network.slow is not None), _following(folder / "progress.json", show):
                run_elastic(workers, folder, network.port, sys.executable, *command)
        except ChildFailedError as error:
            worker, failure = error.get_first_failure()
            raise _worker_error(folder, worker, workers, failure.exitcode) from None
        return Probe.read(folder / "probe.json")


def _worker_error(folder: Path, worker: int, workers: int, code: int) -> WorkerError:
    log = read_log(folder, worker)
    return WorkerError(
        f"worker {worker} of {workers} of the probe failed: {last_error(log) or killed_by(code)}"
        + "".join(f"\n  {line}" for line in last_traceback(log))
        + f"\nThe output of all workers is in {keep_logs(folder, workers)}."
    )


@contextmanager
def _following(path: Path, show: Show) -> Iterator[None]:
    """Show the progress that worker 0 writes to a file, while the block runs."""
    done = Event()

    def follow() -> None:
        seen = ""
        while not done.wait(READ_EVERY_S):
            text = path.read_text() if path.exists() else ""
            if text != seen:
                seen = text
                show(*json.loads(text))

    thread = Thread(target=follow, name="laconic-probe", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def script_step(script: Script, network: Network) -> StepTiming:
    """Run a user's script, whose plan is alone(), for a few steps, and return the seconds of worker 0's."""
    with run_folder() as folder:
        points = launch(replace(script, steps=STEPS, seconds=STEPS_S), folder, network).curve
    took = [(b.seconds - a.seconds) / (b.step - a.step) for a, b in pairwise(points[WARM_UP_STEPS:])]
    found = tuple(each for each in took if each > 0)
    if not found:
        raise WorkerError(
            f"--step-script {script.script}: it ended after {len(points)} reports, and more than {WARM_UP_STEPS + 1} "
            f"are needed. Let it train for {STEPS} steps."
        )
    return StepTiming(found)


def _write(path: Path) -> Callable[[float, str], None]:
    def show(done: float, text: str) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps([done, text]))
        new.replace(path)

    return show


def _main(folder: Path) -> None:
    options = decode(ProbeOptions, json.loads((folder / "options.json").read_text()))
    with process_group(options.device):
        first = os.environ["RANK"] == "0"
        probe = run_probe(options, _write(folder / "progress.json") if first else lambda done, text: None)
        if first:
            probe.write(folder / "probe.json")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
    sys.stdout.flush()
    # A thread of gloo may release its last tensor only now, and abort an interpreter that shuts down (torch 2.13).
    os._exit(0)
