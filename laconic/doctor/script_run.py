"""Run a user's script on all workers, up to the end of its `laconic.attach` or with faults, and record how it ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from laconic.compare.folders import run_folder
from laconic.compare.launch import environment, killed_by, run_elastic
from laconic.compare.settings import LabError
from laconic.doctor import exit_recorder
from laconic.doctor.injection import FACTORY, INJECT, MARKS, UNTIL, Fault, attached_file
from laconic.session.observers import VARIABLE as OBSERVERS

_ERROR = re.compile(r"(?:[A-Za-z_]\w*\.)*(?P<kind>[A-Z]\w*(?:Error|Exception|Interrupt|Exit))\b(?::|$)")


@dataclass(frozen=True)
class ScriptRun:
    """A script, its arguments, its workers, a time limit, and the faults to inject. Without faults, a dry run."""

    script: Path
    arguments: tuple[str, ...] = ()
    workers: int = 2
    limit_s: float = 300.0
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise LabError(f"--workers {self.workers}: there must be at least 1. Use --workers 2 or more.")
        if not self.limit_s > 0:
            raise LabError(f"--seconds {self.limit_s:g}: it must be a number above 0. Leave it out for the default.")
        if not self.script.is_file():
            raise LabError(f"--script {self.script}: there is no such file. Give the path of a training script.")

    def environ(self, folder: Path) -> dict[str, str]:
        """Return the variables through which `laconic.doctor.injection` gets its orders."""
        others = [each for each in os.environ.get(OBSERVERS, "").split(",") if each.strip() not in ("", FACTORY)]
        order = {INJECT: ",".join(map(str, self.faults))} if self.faults else {UNTIL: "attach"}
        return {OBSERVERS: ",".join([*others, FACTORY]), MARKS: str(folder), **order}

    def command(self, folder: Path) -> tuple[str, ...]:
        """Return the command of one worker: the recorder, which starts the script."""
        recorder = (sys.executable, "-I", "-S", exit_recorder.__file__, str(self.limit_s), str(folder))
        return (*recorder, sys.executable, str(self.script), *self.arguments)


@dataclass(frozen=True)
class WorkerExit:
    """How the script ended on one worker, and the last lines of its stderr with their times."""

    worker: int
    code: int = -1
    lines: tuple[tuple[float, str], ...] = ()
    killed: str = ""
    """When and why the recorder killed the script, if it did."""
    plan: str | None = None
    """The plan that the script attached, if `laconic.attach` came to its end."""

    @property
    def error(self) -> tuple[float, str]:
        """The time and the first line of the error that ended the script; an empty line if there was none."""
        return next(((at, line) for at, line in reversed(self.lines) if _ERROR.match(line)), (0.0, ""))

    @property
    def error_class(self) -> str:
        """The class of that error, without its module."""
        match = _ERROR.match(self.error[1])
        return match["kind"] if match else ""

    @property
    def last_line(self) -> str:
        """The error, or else the last line of stderr."""
        return self.error[1] or next((line for _, line in reversed(self.lines) if line.strip()), "")

    @property
    def ending(self) -> str:
        """Describe how the process ended."""
        return self.killed or killed_by(self.code)

    @property
    def reason(self) -> str:
        """Describe why the script ended: the error, or how the process ended and its last line."""
        if self.code > 0 and not self.killed and self.last_line:
            return self.last_line
        return self.ending + (f"; its last line: {self.last_line}" if self.last_line else "")


@dataclass(frozen=True)
class InjectedFault:
    """A fault that a worker has injected."""

    fault: str
    time_s: float


def run_here(run: ScriptRun) -> tuple[list[WorkerExit], list[InjectedFault]]:
    """Start all workers on this machine, and wait for them."""
    with run_folder() as folder:
        with environment(run.environ(folder), run.workers), suppress(ChildFailedError):
            run_elastic(run.workers, folder, 0, *run.command(folder))  # a recorder that was killed has no exit file
        return [_read_exit(folder, worker) for worker in range(run.workers)], _read_faults(folder)


def run_as_worker(run: ScriptRun, worker: int, port: int) -> WorkerExit:
    """Start the script as one worker of a run whose other workers are elsewhere."""
    with run_folder() as folder:
        # The store of the launcher already has the doctor's own workers, so the script gets another.
        own_store = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        environ = {**os.environ, **run.environ(folder), **own_store}
        with (folder / "script.log").open("wb") as log, suppress(subprocess.TimeoutExpired):
            timeout_s = run.limit_s + 30
            subprocess.run(run.command(folder), env=environ, stdout=log, stderr=log, timeout=timeout_s, check=False)
        return _read_exit(folder, worker)


def exit_from_json(worker: int, fields: Mapping[str, Any] | None) -> WorkerExit:
    """Read how a script ended on a worker; None if the worker did not answer."""
    if fields is None:
        return WorkerExit(worker, killed="there is no record of its end")
    lines = tuple((float(at), str(line)) for at, line in fields["lines"])
    plan = None if fields["plan"] is None else str(fields["plan"])
    return WorkerExit(worker, int(fields["code"]), lines, str(fields["killed"]), plan)


def _read_exit(folder: Path, worker: int) -> WorkerExit:
    path, attached = exit_recorder.exit_file(folder, worker), attached_file(folder, worker)
    if not path.exists():
        return exit_from_json(worker, None)
    plan = json.loads(attached.read_text())["plan"] if attached.exists() else None
    return exit_from_json(worker, json.loads(path.read_text()) | {"plan": plan})


def _read_faults(folder: Path) -> list[InjectedFault]:
    lines = [line for path in sorted(folder.glob("faults-*.jsonl")) for line in path.read_text().splitlines()]
    faults = [InjectedFault(str(each["fault"]), float(each["time_s"])) for each in map(json.loads, lines)]
    return sorted(faults, key=lambda each: each.time_s)
