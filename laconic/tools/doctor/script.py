"""Run a user's script on workers, up to the end of its `laconic.attach` or with faults, and report how it ends."""

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import laconic
from laconic.errors import names, outliers
from laconic.session.observers import VARIABLE as OBSERVERS
from laconic.tools.doctor.checks import Finding, finding
from laconic.tools.doctor.injection import FACTORY, INJECT, MARKS, UNTIL, Fault, Mark, fault, read_marks
from laconic.tools.errors import UsageError, check_script
from laconic.tools.launch.output import Tail, find_error, killed_by, may_explain, reason, without_rank, worker_file
from laconic.tools.launch.workers import POLL_S, Worker, run_folder, started

LATE, STOPPED = "killed at the time limit", "stopped, and killed when all other workers had ended"
KEPT_LINES = 200
ATTACH_WARNING = "attach: "  # how a warning of laconic.attach begins on stderr


@dataclass(frozen=True)
class ScriptRun:
    """A script, its arguments, its workers, a time limit, and the faults to inject. Without faults, a dry run."""

    script: Path
    arguments: tuple[str, ...] = ()
    workers: int = 2
    limit_s: float = 300.0
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        check_script(self.script)
        for each in self.faults:
            if each.worker >= self.workers:
                rule = f"there are {self.workers} workers, counted from 0. Use a worker from 0 to {self.workers - 1}."
                raise UsageError(f"--inject {each}: {rule}")

    def variables(self, folder: Path) -> dict[str, str]:
        """Return the variables of `laconic.tools.doctor.injection`."""
        others = [each for each in os.environ.get(OBSERVERS, "").split(",") if each.strip() not in ("", FACTORY)]
        order = {INJECT: ",".join(map(str, self.faults))} if self.faults else {UNTIL: "attach"}
        return {OBSERVERS: ",".join([*others, FACTORY]), MARKS: str(folder), **order}


@dataclass(frozen=True)
class WorkerExit:
    """How the script ended on one worker, and the last lines of its stderr with their times."""

    worker: int
    code: int = -1
    lines: Sequence[tuple[float, str]] = ()
    killed: str = ""
    """When and why the doctor killed the script, if it did."""
    plan: str | None = None
    """The plan that the script attached, if `laconic.attach` came to its end."""
    timeout_s: float | None = None
    """How long the session would wait for a collective, when the first fault was injected."""

    @property
    def error(self) -> tuple[float, str]:
        """The time and the first line of the error that ended the script; an empty line if there was none."""
        number = find_error([line for _, line in self.lines])
        return (0.0, "") if number is None else self.lines[number]

    @property
    def error_class(self) -> str:
        """The class of that error, without its module."""
        return self.error[1].partition(":")[0].rpartition(".")[2]

    @property
    def reason(self) -> str:
        """Why the script ended: the error or its last line, with how the process ended unless it exited by itself."""
        return reason(self.code, [line for _, line in self.lines], self.killed)


def run_here(run: ScriptRun) -> tuple[list[WorkerExit], list[Mark]]:
    """Start all workers on this machine, and wait for them; return how they ended, and the faults in order of time."""
    with run_folder() as folder:
        command = [sys.executable, str(run.script), *run.arguments]
        with started(command, run.workers, folder, variables=run.variables(folder), grace_s=0.0) as running:
            return _watch(run, folder, running), [mark for mark in read_marks(folder) if mark.fault]


def run_as_worker(run: ScriptRun, port: int) -> WorkerExit:
    """Start the script as one worker of a run whose other workers are elsewhere, with a store of its own."""
    store = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with run_folder() as folder:
        environ = {**os.environ, **run.variables(folder), **store}
        with closing(Worker([sys.executable, str(run.script), *run.arguments], environ, folder)) as worker:
            return _watch(run, folder, [worker])[0]


def _watch(run: ScriptRun, folder: Path, workers: Sequence[Worker]) -> list[WorkerExit]:
    """Wait for the end of the script or the time limit; kill stopped workers when others have ended."""
    deadline = time.monotonic() + run.limit_s
    tails = {each.rank: Tail(worker_file(folder, each.rank)) for each in workers}
    logs: dict[int, deque[tuple[float, str]]] = {each.rank: deque(maxlen=KEPT_LINES) for each in workers}
    killed: dict[int, str] = {}
    running = list(workers)
    while running:
        lost = _lost(read_marks(folder))
        time.sleep(POLL_S)  # a lost worker that still runs after this is not killed, but stopped
        running = [each for each in running if each.exit_code is None]
        late = time.monotonic() > deadline
        if late or all(each.rank in lost for each in running):
            killed = {each.rank: LATE if late else STOPPED for each in running}
            for each in running:
                each.close()
            running = []
        for rank, tail in tails.items():
            lines = [without_rank(line) for line in tail.read(at_end=not running)]
            logs[rank] += [(time.time(), line) for line in lines if line]
    marks = read_marks(folder)
    plans = {mark.worker: mark.plan for mark in marks if mark.plan}
    timeouts = {mark.worker: mark.timeout_s for mark in marks if mark.timeout_s}
    return [
        WorkerExit(r, each.wait(), tuple(logs[r]), killed.get(r, ""), plans.get(r), timeouts.get(r))
        for each in workers
        for r in [each.rank]
    ]


def _lost(marks: Sequence[Mark]) -> set[int]:
    """Return the workers that a fault killed, or stopped for good."""
    return {mark.worker for mark in marks if mark.fault and fault(mark.fault).ends_worker}


def check_handshake(exits: Sequence[WorkerExit]) -> list[Finding]:
    """Check that all workers came to the end of `laconic.attach`, with the same plan."""
    absent = [each for each in exits if each.plan is None]
    if absent:
        return [_not_attached(absent)]
    usual, odd = outliers([str(each.plan) for each in exits])
    if odd:  # possible where groups of workers train separately
        found = f"{names(odd)} attached {exits[odd[0]].plan}, the others {usual}"
        why, way_out = "All workers must use the same plan.", "Give all workers the same plan."
        return [Finding("script", "problem", found, why, way_out)]
    found = f"all {len(exits)} workers attached {usual}, with the same parameters and versions"
    lines = dict.fromkeys(line for each in exits for _, line in each.lines if line.startswith(ATTACH_WARNING))
    why, way_out = "Workers with different seeds start from different weights.", "Seed all workers alike."
    return [Finding("script", "ok", found), *(Finding("script", "warning", line, why, way_out) for line in lines)]


def _not_attached(absent: Sequence[WorkerExit]) -> Finding:
    workers = names([each.worker for each in absent])
    with_error = [each for each in absent if each.lines] or absent
    first = next((each for each in with_error if each.error_class == "DisagreementError"), with_error[0])
    if first.code == 0:
        found, why = f"{workers} ended without laconic.attach", "Without it, laconic does nothing."
        way_out = "Call laconic.attach(plan, model, optimizer) in the script, and pass its arguments after --."
        return Finding("script", "problem", found, why, way_out)
    found = f"{workers} did not complete laconic.attach: {first.reason}"
    return Finding("script", "problem", found, "A run would fail in the same way.", "Correct this error first.")


def inject_faults(run: ScriptRun) -> list[Finding]:
    """Run a script with faults on this machine, and report how each worker ended."""
    exits, injected = run_here(run)
    return check_injected(run, injected) + [check_exit(each, injected, run.limit_s) for each in exits]


def check_injected(run: ScriptRun, injected: Sequence[Mark]) -> list[Finding]:
    """Check that every fault was injected."""
    findings = [Finding(f"fault {injected[0].fault}", "ok", "injected")] if injected else []
    for mark in injected[1:]:
        found = f"injected {mark.time_s - injected[0].time_s:.2f} s after the first"
        findings.append(Finding(f"fault {mark.fault}", "ok", found))
    done = {mark.fault for mark in injected}
    for each in run.faults:
        if str(each) not in done:
            found = f"not injected: worker {each.worker} did not reach step {each.step}"
            way_out = "Call laconic.attach in the script and train longer, or choose an earlier step."
            findings.append(Finding(f"fault {each}", "problem", found, "This run does not test the fault.", way_out))
    return findings


def check_exit(each: WorkerExit, injected: Sequence[Mark], limit_s: float) -> Finding:
    """Report how a worker ended, with which error, and how long after the fault. `limit_s` is that of the script."""
    name = f"worker {each.worker}"
    if each.worker in _lost(injected) and (each.code < 0 or each.killed):
        return Finding(name, "ok", f"{each.killed or killed_by(each.code)}, as the fault demands")
    if each.killed:
        return Finding(name, "problem", each.reason, *_not_noticed(each.timeout_s, limit_s))
    after = [(time_s, line) for time_s, line in each.lines if injected and time_s >= injected[0].time_s]
    explaining = [(time_s, line) for time_s, line in after if may_explain(line)]
    time_s, line = each.error if each.code and each.error_class else (*explaining, *after, (0.0, ""))[0]
    before = [mark.time_s for mark in injected if mark.time_s <= time_s]
    when = f", {time_s - before[-1]:.2f} s after the fault" if before else ""
    if each.code == 0:
        return Finding(name, "ok", "exit code 0" + (f"; it logged{when}: {line}" if line else ""))
    why = "This is not one of laconic's own errors: the script or torch failed first, and does not name the worker."
    way_out, found = "Look at this error in the script's own output.", f"exit code {each.code}{when}: {each.reason}"
    return finding(name, each.error_class in laconic.__all__, found, why, way_out, "warning")


def _not_noticed(timeout_s: float | None, limit_s: float) -> tuple[str, str]:
    """Return why a worker did not notice a fault within the time limit of the script, and what to do."""
    if timeout_s is None:
        why = "It did not notice the fault: it waits in code outside laconic, or its timeout is longer."
        return why, "Give laconic.attach a timeout_s, or raise --seconds."
    if timeout_s < limit_s:
        why = f"It did not notice the fault within its timeout_s of {timeout_s:g}: it waits in code outside laconic."
        return why, "Look for a collective of the script's own, such as a barrier, or raise --seconds."
    why = f"Its timeout_s is {timeout_s:g}, longer than the time limit of the script (--seconds {limit_s:g})."
    return why, f"Raise --seconds above {timeout_s:g}, or give laconic.attach a shorter timeout_s."
