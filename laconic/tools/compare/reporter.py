"""Reports the progress of a training to `laconic compare`, through files in a folder.

`laconic compare` sets LACONIC_REPORT to a folder and names `from_env` in LACONIC_OBSERVERS. Each worker then writes
its reports and the seconds of each collective to files of its own. The reporter also ends the run: after a number of
steps or seconds, or at a loss: the validation loss where the script gives one, else the mean
training loss of the last reports and of all workers. Workers agree on it over a process group of their own, so its
traffic is neither in the ledger nor on the link under study.

For a validation, all workers hold the mean of their weights, averaged over that group, and take their own back
afterwards, bit for bit. The time of it does not count. So training does not notice. Under `alone()` there are no
averaged weights: each worker validates its own, and the mean of their losses is reported.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from laconic.ledger import Entry, Ledger
from laconic.plans.schedules import Never
from laconic.session.live_model import local_of
from laconic.session.observers import StepObserver, Validation
from laconic.session.session import Session
from laconic.tools.compare.runs import ABOUT, END, FOLDER, GOAL, REPORTS, SECONDS, SMOOTHED, Ending, Goal, Report
from laconic.tools.errors import UsageError
from laconic.tools.launch.links import Link, framing_bytes, link
from laconic.tools.launch.namespaces import CONTROL_INTERFACE_VARIABLE, INTERFACE_VARIABLE
from laconic.tools.launch.output import worker_file
from laconic.tools.planner.network import collective_s

CHECKED_EVERY = 4  # reports; workers do not wait for each other in between


def from_env() -> CompareReporter | None:
    """Make the reporter for the folder in LACONIC_REPORT; None if it is not set."""
    folder = os.environ.get(FOLDER)
    return None if folder is None else CompareReporter(Path(folder))


class CompareReporter(StepObserver):
    """Writes the reports of one worker, and ends the training at its goal."""

    def __init__(self, folder: Path) -> None:
        content = json.loads((folder / GOAL).read_text())
        self._folder = folder
        self._goal = Goal(**content["goal"])
        self._computed = None if content["computed"] is None else link(content["computed"])
        self._worker = dist.get_rank() if dist.is_initialized() else 0
        self._tokens = 0
        self._end: Report | None = None
        self._stepped = False

    def attached(self, session: Session) -> None:
        """Open the files and start the clock, at the same time on all workers."""
        session.plan.check_by_steps("laconic compare")
        importlib.import_module("torch._dynamo")  # an optimizer's first step would: a second that is not its own
        self._plan = session.plan
        if self._worker == 0:
            parameters = sum(p.numel() for p in session.parameters.values())
            self._about = {"plan": repr(session.given), "parameters": parameters}
            (self._folder / ABOUT).write_text(json.dumps(self._about))
        atexit.register(self._exit)
        self._file = worker_file(self._folder, self._worker, REPORTS).open("w", buffering=1)
        seconds = worker_file(self._folder, self._worker, SECONDS).open("wb", buffering=0)
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

    def after_step(self, session: Session) -> None:
        """Note that the run has begun."""
        self._stepped = True

    def restarted(self, session: Session) -> None:
        """Refuse a script that resumes: it would train the rest of an earlier run, or nothing at all."""
        if session.step and not self._stepped:
            raise UsageError(
                f"the script goes on from a checkpoint of step {session.step}: its losses, bytes and seconds would be "
                "those of the rest of another run. laconic compare needs runs from the first step: remove the "
                f"checkpoint, or let the script resume only where {FOLDER} is not set."
            )

    def report(self, session: Session, loss: float | Tensor, tokens: int, validation: Validation | None = None) -> bool:
        """Write the progress after a step; return whether the run has reached its goal.

        A report before the first step has a validation loss only, and the clock starts after it. One after the end of
        the run replaces the validation loss of the last.
        """
        if self._end is not None:
            self._end = replace(self._end, validation=self._validate(session, validation, last=True))
            self._write(self._end)
            return True
        self._note_change(session)
        self._tokens += tokens
        self._check.validates |= validation is not None
        validated = self._validate(session, validation, self._check.is_last(session.step))
        seconds = time.perf_counter() - self._began - self._validate.paused_s + self._times.link_s
        value = number(loss)
        ended: Ending = self._check(session.step, value, seconds, validated) if session.step else ""
        made = self._report(session, value, seconds, ended, validated)
        self._write(made)
        if ended:
            self._end = made
        elif not session.step:
            self._began = time.perf_counter() - self._validate.paused_s
        return bool(ended)

    def detached(self, session: Session) -> None:
        """Close the files."""
        self._file.close()
        self._times.close()

    def _note_change(self, session: Session) -> None:
        """Write the new plan of a run that has changed it."""
        if session.plan is not self._plan:
            self._plan = session.plan
            if self._worker == 0:
                (self._folder / ABOUT).write_text(json.dumps({**self._about, "changed_to": repr(session.plan)}))

    def _write(self, report: Report) -> None:
        self._file.write(json.dumps(asdict(report)) + "\n")

    def _exit(self) -> None:
        """Record that the script has come to its end, unless an error has ended it. Called when Python exits."""
        with contextlib.suppress(OSError):  # the folder may be gone
            if getattr(sys, "last_value", None) is None:
                worker_file(self._folder, self._worker, END).touch()

    def _report(self, session: Session, loss: float, seconds: float, ended: Ending, validation: float | None) -> Report:
        ledger, times, health, counted = session.ledger, self._times, session.health, interface_bytes()
        return Report(
            worker=self._worker,
            step=session.step,
            loss=loss,
            seconds=seconds,
            tokens=self._tokens,
            wire_bytes=ledger.wire_bytes,
            framing_bytes=times.framing_bytes,
            interface_bytes=None if counted is None else counted - self._interface_before,
            communication_seconds=min(times.busy_s + times.link_s, seconds),
            link_seconds=times.link_s,
            level_bytes={name: total.wire_bytes for name, total in ledger.totals(by="level").items()},
            ended=ended,
            validation=validation,
            residual=None if health is None else health.residual,
            agreement=None if health is None else health.agreement,
            noise=None if health is None else health.noise,
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
        if goal.until_loss is not None and validation is not None and validation <= goal.until_loss:
            return "loss"
        wanted = goal.seconds is not None or (goal.until_loss is not None and not self.validates)
        if wanted and (last or self._reports % CHECKED_EVERY == 0):
            loss, seconds = mean_over(self._control, sum(self._recent) / len(self._recent), seconds)
            if goal.until_loss is not None and not self.validates and loss <= goal.until_loss:
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


class Validator:
    """Validates every `every` steps and at the end. All workers call it after the same steps.

    `control` is the group that workers agree over, `replicas` the one of workers that hold the same part of the model.
    """

    def __init__(self, every: int, control: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None) -> None:
        self._every = every
        self._control = control
        self._replicas = replicas
        self._since = 0
        self.paused_s = 0.0
        """The seconds of all validations."""

    def __call__(self, session: Session, validation: Validation | None, last: bool) -> float | None:
        """The mean validation loss of all workers, if the script has one for this step; else None."""
        if validation is None:
            return None
        if not callable(validation):
            return mean_over(self._control, number(validation))[0]
        self._since += 1
        # A fragment that is in flight would travel while the clock stands still.
        late = session.in_flight and self._since < 2 * self._every
        if not last and (self._since < self._every or late):
            return None
        self._since = 0
        if self._control is not None:
            dist.barrier(self._control)  # to wait for the slowest worker is part of the training
        began = time.perf_counter()
        with mean_weights(session, self._replicas):
            value = number(validation())
        mean = mean_over(self._control, value)[0]
        self.paused_s += time.perf_counter() - began
        return mean


@contextmanager
def mean_weights(session: Session, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Let the model hold the mean of all workers' weights and buffers while the block runs, then this worker's own."""
    plan = session.plan
    if group is None or not plan.local or isinstance(plan.schedule, Never) or session.step < plan.schedule.start:
        yield  # all workers have the same weights, or each has its own for good
        return
    with mean_of([local_of(t) for t in (*session.parameters.values(), *session.buffers.values())], group):
        yield


@contextmanager
def mean_of(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Iterator[None]:
    """Let tensors hold their mean over all workers while the block runs, then this worker's own values, bit for bit."""
    before = [t.clone() for t in tensors]
    with torch.no_grad():
        for t in tensors:
            total = t.to("cpu", torch.promote_types(t.dtype, torch.float32), copy=True)
            dist.all_reduce(total, group=group)
            t.copy_(total / group.size())
    try:
        yield
    finally:
        with torch.no_grad():
            for t, own in zip(tensors, before, strict=True):
                t.copy_(own)


def mean_over(group: dist.ProcessGroup | None, *values: float) -> tuple[float, ...]:
    """The mean of each value over the workers, bit-identical on all of them."""
    if group is None:
        return values
    means = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(means, group=group)
    return tuple((means / group.size()).tolist())


def number(value: float | Tensor) -> float:
    """A loss as a number."""
    return float(value.detach() if isinstance(value, Tensor) else value)
