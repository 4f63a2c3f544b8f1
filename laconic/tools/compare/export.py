"""The results of a comparison as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from laconic.tools.compare.judging import efficiency, kept, no_better_than_alone
from laconic.tools.compare.records import Outcome
from laconic.tools.machine import versions


def as_json(outcomes: Sequence[Outcome]) -> str:
    """A JSON list with one object for each outcome. NaN and infinity, which JSON does not have, become null."""
    rows = json.dumps([asdict(each) | judgements(each, outcomes) | {"versions": versions()} for each in outcomes])
    return json.dumps(json.loads(rows, parse_constant=lambda name: None), indent=1, allow_nan=False) + "\n"


def judgements(outcome: Outcome, outcomes: Sequence[Outcome]) -> dict[str, object]:
    """How an outcome is judged beside the others."""
    return {
        "kept": kept(outcome, outcomes),
        "efficiency": efficiency(outcome, outcomes),
        "no_better_than_alone": no_better_than_alone(outcome, outcomes),
    }
