"""Trainings give the results that are recorded: a change that is not meant to change them has not.

A change that is meant to runs `python -m tests.recording`, and says why in its message.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.recording import FILE, plain, record

RECORDED = json.loads(FILE.read_text())


@pytest.mark.parametrize(
    "workers", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.nightly)]
)
def test_losses_ledgers_and_states_are_as_recorded(workers):
    recorded, now = RECORDED[str(workers)], record(workers)
    if plain() != RECORDED["plain"]:  # torch itself computes other bits on this machine
        recorded, now = _without_bits(recorded), _without_bits(now)
        for worker in (worker for each in recorded.values() for worker in each):
            worker["loss"] = pytest.approx(worker["loss"], rel=1e-3)
    assert set(now) == set(recorded)
    different = {case: [found, recorded[case]] for case, found in now.items() if found != recorded[case]}
    assert not different


def _without_bits(cases: dict[str, Any]) -> dict[str, Any]:
    return {
        case: [{"loss": worker["loss"], "ledger": worker["ledger"]} for worker in each] for case, each in cases.items()
    }
