"""Findings: what a check saw, why it matters, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Verdict: TypeAlias = Literal["ok", "warning", "problem"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Finding:
    """The result of one check. `why` and `way_out` are empty if the verdict is "ok"."""

    name: str
    verdict: Verdict
    found: str
    why: str = ""
    way_out: str = ""
    workers: tuple[int, ...] = ()
    """The workers that the finding is about. Empty: this machine, or all workers."""


def ok(name: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, why: str, way_out: str) -> Finding:
    """The run works, but possibly slowly or not as intended."""
    return Finding(name, "warning", found, why, way_out)


def problem(name: str, found: str, why: str, way_out: str) -> Finding:
    """The run fails, or trains on wrong values."""
    return Finding(name, "problem", found, why, way_out)


def has_problem(findings: Iterable[Finding]) -> bool:
    """Return whether there is at least one problem."""
    return any(finding.verdict == "problem" for finding in findings)


def from_json(fields: Mapping[str, object], worker: int) -> Finding:
    """Read a finding of another worker. It comes from the network: take only text and known verdicts."""
    verdict: Verdict = next((each for each in VERDICTS if each == fields.get("verdict")), "problem")
    name, found, why, way_out = (str(fields.get(part, "")) for part in ("name", "found", "why", "way_out"))
    return Finding(name, verdict, found, why, way_out, (worker,))


def merged(by_worker: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Merge equal findings of several workers into one that lists these workers, in the order of the checks."""
    workers_of: dict[tuple[str, Verdict, str, str, str], list[int]] = {}
    for worker, findings in enumerate(by_worker):
        for each in findings:
            workers_of.setdefault((each.name, each.verdict, each.found, each.why, each.way_out), []).append(worker)
    names = list(dict.fromkeys(key[0] for key in workers_of))
    return [
        Finding(*key, workers=() if len(workers) == len(by_worker) else tuple(workers))
        for key, workers in sorted(workers_of.items(), key=lambda item: names.index(item[0][0]))
    ]
