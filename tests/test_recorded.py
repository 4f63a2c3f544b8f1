"""Trainings give the results that are recorded: a change that is not meant to change them has not.

A change that is meant to runs `python -m tests.recording`, and says why in its message.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.recording import FILE, WORKERS, plain, record

RECORDED = json.loads(FILE.read_text())


@pytest.mark.parametrize(
    "workers", [pytest.param(n, marks=pytest.mark.slow if n == 2 else pytest.mark.nightly) for n in WORKERS]
)
def test_losses_ledgers_and_states_are_as_recorded(workers):
    recorded = {key.removeprefix(f"{workers} "): v for key, v in RECORDED.items() if key.startswith(f"{workers} ")}
    now = record(workers)
    assert set(now) == set(recorded)
    if plain() != RECORDED["plain"]:  # torch itself computes other bits on this machine
        recorded = {case: _without_bits(each) for case, each in recorded.items()}
        now = {case: _without_bits(each) for case, each in now.items()}
        for each in recorded.values():
            each["loss"] = pytest.approx(each["loss"], rel=1e-3)
    different = {
        case: {key: [found[key], recorded[case].get(key)] for key in found if found[key] != recorded[case].get(key)}
        for case, found in now.items()
    }
    assert not {case: fields for case, fields in different.items() if fields}


def _without_bits(case: dict[str, Any]) -> dict[str, Any]:
    return {"loss": case["loss"], "ledger": case["ledger"]}
