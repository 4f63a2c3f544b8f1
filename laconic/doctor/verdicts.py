"""What the visits to a user's script amount to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import laconic
from laconic.checks.outliers import names, outliers
from laconic.compare.launch import killed_by
from laconic.doctor.finding import Finding, ok, problem, warning
from laconic.doctor.visit import Ended, Mark, Visit, warnings_of


def check_handshake(ended: Sequence[Ended], attached: Sequence[Mapping[str, object] | None]) -> list[Finding]:
    """Whether all workers of a script came through `laconic.session.session`, and with the same plan."""
    absent = [worker for worker, said in enumerate(attached) if said is None]
    if absent:
        return [_not_attached(ended, absent)]
    plans = [str(said["plan"]) for said in attached if said is not None]
    usual, odd = outliers(plans)
    if odd:  # groups that do not talk to each other could differ
        return [problem("script", f"{names(odd)} runs {plans[odd[0]]}, the others {usual}", "Give all the same plan.")]
    found = f"all {len(attached)} workers attached {usual}, and agree about plan, parameters and versions"
    cautions = [
        warning("script", text, "Seed all workers alike before the model is made.") for text in warnings_of(ended)
    ]
    return [ok("script", found), *cautions]


def _not_attached(ended: Sequence[Ended], absent: Sequence[int]) -> Finding:
    spoken = [each for each in ended if each.worker in absent and each.last_words]
    first = next(
        (each for each in spoken if each.error_class == "DisagreementError"), (spoken or [ended[absent[0]]])[0]
    )
    if first.code == 0:
        return problem(
            "script",
            f"{names(absent)} ended without laconic.session.session",
            "Let the script call laconic.attach(plan, model, optimizer), and give the arguments it needs after --.",
        )
    found = f"{names(absent)} did not come through laconic.session.session: {how(first)}"
    return problem("script", found, "Mend this first: a run would end the same way.")


def how(ended: Ended) -> str:
    """How a worker ended, in words."""
    if ended.ended_because:
        return f"{ended.ended_because}, so it was ended" + (f": {ended.last_words}" if ended.last_words else "")
    if ended.code < 0:
        return killed_by(ended.code)
    return ended.last_words if ended.code and ended.last_words else f"it left with exit code {ended.code}"


def check_faults_made(visit: Visit, marks: Sequence[Mark]) -> list[Finding]:
    """Whether every fault was made."""
    made = {mark.fault for mark in marks}
    first = marks[0].at if marks else 0.0
    findings = [
        ok(f"fault {m.fault}", f"made {m.at - first:.2f} s after the first" if m.at > first else "made") for m in marks
    ]
    return findings + [
        problem(
            f"fault {fault}",
            f"it was not made: worker {fault.worker} never came to step {fault.step}",
            "Let the script call laconic.session.session and train that far, or choose an earlier step.",
        )
        for fault in visit.faults
        if str(fault) not in made
    ]


def check_survivors(visit: Visit, ended: Sequence[Ended], marks: Sequence[Mark]) -> list[Finding]:
    """What each worker ended with, and how long after the fault."""
    gone = {f.worker for f in visit.faults if f.kind == "kill" or (f.kind == "stop" and f.seconds is None)}
    made = {mark.fault for mark in marks}
    lost = {f.worker for f in visit.faults if f.worker in gone and str(f) in made}
    return [_survivor(each, marks, each.worker in lost) for each in ended]


def _survivor(ended: Ended, marks: Sequence[Mark], was_lost: bool) -> Finding:
    name = f"worker {ended.worker}"
    if was_lost and (ended.code < 0 or ended.ended_because):
        return ok(name, f"{how(ended)}, as asked")
    delay = since_fault(ended, marks)
    if ended.ended_because:
        return problem(name, how(ended), "It noticed nothing. Does it wait outside laconic? Give attach a timeout_s.")
    when = "" if delay is None else f" {delay:.2f} s after the fault"
    if ended.code == 0:
        heard = next((line for at, line in ended.lines if marks and at >= marks[0].at and line.strip()), "")
        return ok(name, "ended well" + (f", and said{when}: {heard}" if heard else ""))
    found = f"exit code {ended.code},{when}: {ended.last_words or killed_by(ended.code)}"
    if is_typed(ended.error_class):
        return ok(name, found)
    return warning(name, found, "This is not one of laconic's own errors: the script, or torch, noticed first.")


def is_typed(kind: str) -> bool:
    """Whether an error is one of those that laconic raises about other workers."""
    found = getattr(laconic, kind, None) if kind.endswith("Error") else None
    return isinstance(found, type) and issubclass(found, Exception)


def since_fault(ended: Ended, marks: Sequence[Mark]) -> float | None:
    """Seconds from the latest fault before a worker's error, or before the first thing it said after one."""
    if ended.error is not None:
        said = ended.error[0]
    else:
        said = next((at for at, line in ended.lines if marks and at >= marks[0].at and line.strip()), 0.0)
    before = [mark.at for mark in marks if mark.at <= said]
    return said - before[-1] if before else None
