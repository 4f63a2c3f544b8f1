"""Reports the progress of a training to `laconic compare`, through files in a folder.

`laconic compare` sets LACONIC_REPORT to a folder and names `from_env` in LACONIC_OBSERVERS. Each worker then writes
its progress and the seconds of each collective to files of its own. The reporter also ends the run: after a number of
steps or seconds, or at a loss: the validation loss where the script gives one (`validating.py`), else the mean
training loss of the last reports and of all workers. Workers agree on it over a process group of their own, so its
traffic is neither in the ledger nor on the link under study.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import importlib
import json
import os
import sys
import threading
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import IO

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from laconic.ledger import Entry, Ledger
from laconic.session.observers import StepObserver, Validation
from laconic.session.session import Session
from laconic.tools.compare.inputs import Fingerprints, imported_files
from laconic.tools.compare.progress import Ending, Goal, Progress, progress_file, read_progress
from laconic.tools.compare.validating import Validator, mean_over, number
from laconic.tools.launch.links import Link, framing_bytes, link
from laconic.tools.launch.namespaces import CONTROL_INTERFACE_VARIABLE, INTERFACE_VARIABLE
from laconic.tools.planner.network import collective_s

FOLDER = "LACONIC_REPORT"
GOAL = "goal.json"
ABOUT = "about.json"  # where worker 0 writes the plan and the number of parameters
FILES = "files.json"  # where worker 0 writes the fingerprints of the modules that it has imported
SMOOTHED = 8  # reports in the mean that is compared with the target loss
CHECKED_EVERY = 4  # reports; workers do not wait for each other in between


def write_goal(folder: Path, goal: Goal, computed: Link | None) -> None:
    """Write what the reporters of a run need: its goal, and the link whose time they compute, if any."""
    content = {"goal": asdict(goal), "computed": None if computed is None else str(computed)}
    (folder / GOAL).write_text(json.dumps(content))


def seconds_file(folder: Path, worker: int) -> Path:
    """The file to which a worker writes the seconds of each collective, as doubles."""
    return folder / f"worker-{worker}.seconds"


def read_files(folder: Path) -> Fingerprints:
    """The fingerprints of the modules that worker 0 has imported."""
    found: Fingerprints = json.loads((folder / FILES).read_text())
    return found


def has_ended(folder: Path, worker: int) -> bool:
    """Whether a worker has reached the goal of the run, or has come to the end of its script without an error."""
    reports = read_progress(folder, worker)
    return bool(reports) and (bool(reports[-1].ended) or _end_file(folder, worker).exists())


def _end_file(folder: Path, worker: int) -> Path:
    return folder / f"worker-{worker}.end"


def from_env() -> CompareReporter | None:
    """Make the reporter for the folder in LACONIC_REPORT; None if it is not set."""
    folder = os.environ.get(FOLDER)
    return None if folder is None else CompareReporter(Path(folder))


class CompareReporter(StepObserver):
    """Writes the progress of one worker, and tells the training when to stop."""

    def __init__(self, folder: Path) -> None:
        content = json.loads((folder / GOAL).read_text())
        self._folder = folder
        self._goal = Goal(**content["goal"])
        self._computed = None if content["computed"] is None else link(content["computed"])
        self._worker = dist.get_rank() if dist.is_initialized() else 0
        self._tokens = 0

    def attached(self, session: Session) -> None:
        """Open the files and start the clock, at the same time on all workers."""
        importlib.import_module("torch._dynamo")  # an optimizer's first step would: a second that is not its own
        self._plan = session.plan
        if self._worker == 0:
            parameters = sum(p.numel() for p in session.parameters.values())
            self._about = {"plan": repr(session.plan), "parameters": parameters}
            (self._folder / ABOUT).write_text(json.dumps(self._about))
            self._write_files()
        atexit.register(self._end)
        self._file = progress_file(self._folder, self._worker).open("w", buffering=1)
        seconds = seconds_file(self._folder, self._worker).open("wb", buffering=0)
        self._times = TimedLedger(session.ledger, self._computed, seconds)
        together = _workers_that_stop_together(session)
        control = replicas = control_group(together)
        if together is not session.group:
            replicas = control_group(session.group)
        self._check = StopCheck(self._goal, control)
        self._validate = Validator(self._goal.validate_every, control, replicas)
        if control is not None:
            dist.barrier(control)
        self._interface_before = interface_bytes() or 0
        self._began = time.perf_counter()

    def report(self, session: Session, loss: float | Tensor, tokens: int, validation: Validation | None = None) -> bool:
        """Write the progress after a step; return whether the run has reached its goal."""
        value = number(loss)
        if session.plan is not self._plan:
            self._plan = session.plan
            if self._worker == 0:
                (self._folder / ABOUT).write_text(json.dumps({**self._about, "changed_to": repr(session.plan)}))
        self._tokens += tokens
        self._check.validates |= validation is not None
        validated = self._validate(session, validation, self._check.is_last(session.step))
        seconds = time.perf_counter() - self._began - self._validate.paused_s + self._times.link_s
        ended = self._check(session.step, value, seconds, validated)
        progress = self._progress(session, value, seconds, ended, validated)
        self._file.write(json.dumps(asdict(progress)) + "\n")
        return bool(ended)

    def detached(self, session: Session) -> None:
        """Close the files."""
        self._file.close()
        self._times.close()

    def _write_files(self) -> None:
        """Write the fingerprints of the modules that are imported by now. Earlier ones stay as they were."""
        path = self._folder / FILES
        before = read_files(self._folder) if path.exists() else {}
        path.write_text(json.dumps(imported_files() | before))

    def _end(self) -> None:
        """Record that the script has come to its end, unless an error has ended it. Called when Python exits."""
        with contextlib.suppress(OSError):  # the folder may be gone
            if getattr(sys, "last_value", None) is None:
                _end_file(self._folder, self._worker).touch()
            if self._worker == 0:
                self._write_files()

    def _progress(
        self, session: Session, loss: float, seconds: float, ended: Ending, validation: float | None
    ) -> Progress:
        ledger, times = session.ledger, self._times
        counted = interface_bytes()
        return Progress(
            worker=self._worker,
            step=session.step,
            steps=self._goal.steps or 0,
            loss=loss,
            tokens_per_s=self._tokens / seconds,
            sent_bytes=ledger.wire_bytes,
            seconds=seconds,
            wire_bytes=ledger.wire_bytes,
            framing_bytes=times.framing_bytes,
            interface_bytes=None if counted is None else counted - self._interface_before,
            communication_s=min(times.busy_s + times.link_s, seconds),
            link_s=times.link_s,
            level_bytes={name: total.wire_bytes for name, total in ledger.totals(by="level").items()},
            seconds_limit=self._goal.seconds or 0.0,
            ended=ended,
            validation=validation,
            residual=None if session.health is None else session.health.residual,
            agreement=None if session.health is None else session.health.agreement,
        )


class TimedLedger:
    """Adds times to a ledger: how long a collective was in flight, and how long a given link would take.

    It also counts the headers of gloo and TCP. With `seconds`, an unbuffered file, it writes the seconds of each
    collective among all workers there. Collectives have the same order on every worker, so the files of all workers
    together show how long each worker waited for the last one.
    """

    def __init__(self, ledger: Ledger, computed: Link | None = None, seconds: IO[bytes] | None = None) -> None:
        self.busy_s = 0.0
        self.link_s = 0.0
        self.framing_bytes = 0
        self._computed = computed
        self._seconds = seconds
        self._busy_until = 0.0
        self._lock = threading.Lock()
        for entry in list(ledger.entries):  # the handshake of `attach`
            self._add(entry)
        ledger.subscribe(self._add)

    def _add(self, entry: Entry) -> None:
        now = time.perf_counter()
        with self._lock:
            self.busy_s += max(0.0, now - max(now - entry.seconds, self._busy_until))
            self._busy_until = now
            self.framing_bytes += framing_bytes(entry.op, entry.payload_bytes, entry.workers)
            if self._computed is not None:
                reached = self._computed.inside(entry.workers)
                self.link_s += collective_s(entry.op, entry.payload_bytes, entry.workers, reached)
            if self._seconds is not None and entry.level == "world":
                self._seconds.write(array.array("d", [entry.seconds]).tobytes())

    def close(self) -> None:
        """Close the file. The ledger may still be in use."""
        with self._lock:
            if self._seconds is not None:
                self._seconds.close()
                self._seconds = None


class StopCheck:
    """Decides after each report whether the run has reached its goal. All workers decide the same."""

    def __init__(self, goal: Goal, control: dist.ProcessGroup | None) -> None:
        self.validates = False
        """Whether the script reports validation losses, which are then compared with the target instead."""
        self._goal = goal
        self._control = control
        self._recent: deque[float] = deque(maxlen=SMOOTHED)
        self._reports = 0

    def is_last(self, step: int) -> bool:
        """Whether this is the last step of the run at the latest."""
        return self._goal.steps is not None and step >= self._goal.steps

    def __call__(self, step: int, loss: float, seconds: float, validation: float | None = None) -> Ending:
        """Return which limit the run has reached, or "" if none. `validation` is the same on all workers."""
        self._recent.append(loss)
        self._reports += 1
        goal, last = self._goal, self.is_last(step)
        if goal.loss is not None and validation is not None and validation <= goal.loss:
            return "loss"
        wanted = goal.seconds is not None or (goal.loss is not None and not self.validates)
        if wanted and (last or self._reports % CHECKED_EVERY == 0):
            loss, seconds = mean_over(self._control, sum(self._recent) / len(self._recent), seconds)
            if goal.loss is not None and not self.validates and loss <= goal.loss:
                return "loss"
            if goal.seconds is not None and seconds >= goal.seconds:
                return "seconds"
        return "steps" if last else ""


def control_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Make a gloo group of the same workers, over the control interface if there is one. None for one worker."""
    if group is None or group.size() == 1:
        return None
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if CONTROL_INTERFACE_VARIABLE in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ[CONTROL_INTERFACE_VARIABLE]
    try:
        ranks = dist.get_process_group_ranks(group)
        made: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        dist.barrier(made)
    finally:
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    return made


def _workers_that_stop_together(session: Session) -> dist.ProcessGroup | None:
    """The session's workers; of a sharded model all, as the workers of one replica must stop together, too."""
    sharded = any(isinstance(p, DTensor) for p in session.parameters.values())
    return dist.group.WORLD if sharded else session.group


def interface_bytes() -> int | None:
    """The bytes that the network interface under study has sent so far; None if there is no such interface."""
    if INTERFACE_VARIABLE not in os.environ:
        return None
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == os.environ[INTERFACE_VARIABLE]:
            return int(numbers.split()[8])
    return None
