"""Findings from runs of a user's script."""

from __future__ import annotations

from collections.abc import Sequence

import laconic
from laconic.checks.outliers import names, outliers
from laconic.doctor.finding import Finding, ok, problem, warning
from laconic.doctor.script_run import InjectedFault, ScriptRun, WorkerExit

ATTACH_WARNING = "attach: "  # how a warning of laconic.attach begins on stderr


def check_handshake(exits: Sequence[WorkerExit]) -> list[Finding]:
    """Check that all workers came to the end of `laconic.attach`, with the same plan."""
    absent = [each for each in exits if each.plan is None]
    if absent:
        return [_not_attached(absent)]
    usual, odd = outliers([str(each.plan) for each in exits])
    if odd:  # possible where groups of workers train separately
        found = f"{names(odd)} attached {exits[odd[0]].plan}, the others {usual}"
        return [problem("script", found, "All workers must use the same plan.", "Give all workers the same plan.")]
    found = f"all {len(exits)} workers attached {usual}, with the same parameters and versions"
    lines = dict.fromkeys(line for each in exits for _, line in each.lines if line.startswith(ATTACH_WARNING))
    why, way_out = "Workers with different seeds start from different weights.", "Seed all workers alike."
    return [ok("script", found), *(warning("script", line, why, way_out) for line in lines)]


def _not_attached(absent: Sequence[WorkerExit]) -> Finding:
    workers = names([each.worker for each in absent])
    with_error = [each for each in absent if each.last_line] or absent
    first = next((each for each in with_error if each.error_class == "DisagreementError"), with_error[0])
    if first.code == 0:
        found, why = f"{workers} ended without laconic.attach", "Without it, laconic does nothing."
        way_out = "Call laconic.attach(plan, model, optimizer) in the script, and pass its arguments after --."
        return problem("script", found, why, way_out)
    found = f"{workers} did not complete laconic.attach: {first.reason}"
    return problem("script", found, "A run would fail in the same way.", "Correct this error first.")


def check_injected(run: ScriptRun, injected: Sequence[InjectedFault]) -> list[Finding]:
    """Check that every fault was injected."""
    start_s = injected[0].time_s if injected else 0.0
    findings = [ok(f"fault {each.fault}", _injected_text(each.time_s - start_s)) for each in injected]
    done = {each.fault for each in injected}
    for fault in run.faults:
        if str(fault) not in done:
            found = f"not injected: worker {fault.worker} did not reach step {fault.step}"
            way_out = "Call laconic.attach in the script and train longer, or choose an earlier step."
            findings.append(problem(f"fault {fault}", found, "This run does not test the fault.", way_out))
    return findings


def _injected_text(after_s: float) -> str:
    return f"injected {after_s:.2f} s after the first" if after_s else "injected"


def check_exits(run: ScriptRun, exits: Sequence[WorkerExit], injected: Sequence[InjectedFault]) -> list[Finding]:
    """Report how each worker ended, with which error, and how long after the fault."""
    done = {each.fault for each in injected}
    fatal = [fault for fault in run.faults if fault.kind == "kill" or (fault.kind == "stop" and fault.seconds is None)]
    lost = {fault.worker for fault in fatal if str(fault) in done}
    return [_exit(each, injected, each.worker in lost) for each in exits]


def _exit(each: WorkerExit, injected: Sequence[InjectedFault], was_lost: bool) -> Finding:
    name = f"worker {each.worker}"
    if was_lost and (each.code < 0 or each.killed):
        return ok(name, f"{each.ending}, as the fault demands")
    if each.killed:
        why = "It did not notice the fault: it waits in code outside laconic, or its timeout is longer."
        return problem(name, each.reason, why, "Give laconic.attach a timeout_s, or raise --seconds.")
    time_s, line = _first_line_after(each, injected) if each.code == 0 or not each.error_class else each.error
    before = [fault.time_s for fault in injected if fault.time_s <= time_s]
    when = f", {time_s - before[-1]:.2f} s after the fault" if before else ""
    if each.code == 0:
        return ok(name, "exit code 0" + (f"; it logged{when}: {line}" if line else ""))
    found = f"exit code {each.code}{when}: {each.reason}"
    if is_laconic_error(each.error_class):
        return ok(name, found)
    why = "This is not one of laconic's own errors: the script or torch failed first, and does not name the worker."
    return warning(name, found, why, "Look at this error in the script's own output.")


def _first_line_after(each: WorkerExit, injected: Sequence[InjectedFault]) -> tuple[float, str]:
    """The first line of stderr after the first fault."""
    start_s = injected[0].time_s if injected else float("inf")
    return next(((at, line) for at, line in each.lines if at >= start_s and line.strip()), (0.0, ""))


def is_laconic_error(name: str) -> bool:
    """Return whether an error class is one of laconic's own."""
    found = getattr(laconic, name, None) if name.endswith("Error") else None
    return isinstance(found, type) and issubclass(found, Exception)
