"""A finding: what a check saw, whether that is well, and what to do if it is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Verdict: TypeAlias = Literal["ok", "warning", "problem"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Finding:
    """What one check has to say. `way_out` is empty where nothing needs to be done."""

    name: str
    verdict: Verdict
    found: str
    way_out: str = ""
    workers: tuple[int, ...] = ()
    """The workers that it is about; none: this machine, or all of them together."""


def ok(name: str, found: str, note: str = "") -> Finding:
    """All is well; `note` is worth knowing all the same."""
    return Finding(name, "ok", found, note)


def warning(name: str, found: str, way_out: str) -> Finding:
    """It will run, but perhaps not as wished."""
    return Finding(name, "warning", found, way_out)


def problem(name: str, found: str, way_out: str) -> Finding:
    """It will not run, or not rightly."""
    return Finding(name, "problem", found, way_out)


def has_problem(findings: Iterable[Finding]) -> bool:
    """Whether anything must be mended before a run."""
    return any(finding.verdict == "problem" for finding in findings)


def from_json(said: Mapping[str, object], worker: int) -> Finding:
    """A finding that another worker has sent. It comes from the network: only text is taken, and known verdicts."""
    verdict: Verdict = next((each for each in VERDICTS if each == said.get("verdict")), "problem")
    name, found, way_out = (str(said.get(part, "")) for part in ("name", "found", "way_out"))
    return Finding(name, verdict, found, way_out, (worker,))


def merged(by_worker: Sequence[Sequence[Finding]]) -> list[Finding]:
    """The findings of all workers, each said once with the workers that it holds for, in the order of the checks."""
    together: dict[tuple[str, Verdict, str, str], list[int]] = {}
    for worker, findings in enumerate(by_worker):
        for each in findings:
            together.setdefault((each.name, each.verdict, each.found, each.way_out), []).append(worker)
    names = list(dict.fromkeys(key[0] for key in together))
    everyone = len(by_worker)
    return [
        Finding(*key, workers=() if len(workers) == everyone else tuple(workers))
        for key, workers in sorted(together.items(), key=lambda item: names.index(item[0][0]))
    ]
