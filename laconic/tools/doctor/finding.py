"""Findings: what a check saw, why it matters, and what to do."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

Severity: TypeAlias = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check. With a problem the run fails or trains on wrong values; with a warning it may be slow.

    `why` and `way_out` are empty if the severity is "ok".
    """

    name: str
    severity: Severity
    found: str
    why: str = ""
    way_out: str = ""
    workers: tuple[int, ...] = ()
    """The workers that the finding is about. Empty: this machine, or all workers."""


def finding(name: str, fine: bool, found: str, why: str, way_out: str, otherwise: Severity = "problem") -> Finding:
    """Make a finding that is "ok" if `fine`, else `otherwise`."""
    return Finding(name, "ok", found) if fine else Finding(name, otherwise, found, why, way_out)


def has_problem(findings: Iterable[Finding]) -> bool:
    """Return whether there is at least one problem."""
    return any(each.severity == "problem" for each in findings)


def merged(findings: Sequence[Finding], workers: int) -> list[Finding]:
    """Merge the equal findings of several workers into one that lists these workers, in the order of the checks."""
    workers_of: dict[Finding, tuple[int, ...]] = {}
    for each in findings:
        key = replace(each, workers=())
        workers_of[key] = workers_of.get(key, ()) + each.workers
    names = list(dict.fromkeys(each.name for each in workers_of))
    ordered = sorted(workers_of, key=lambda each: names.index(each.name))
    return [each if len(workers_of[each]) == workers else replace(each, workers=workers_of[each]) for each in ordered]
