"""The errors of workers reach a driver: Ray and multiprocessing pickle them."""

from __future__ import annotations

import pickle

import pytest

import laconic

ERRORS = [
    laconic.NonFiniteError("step 5: NaN on worker 1.", [1]),
    laconic.DivergedError("step 5: worker 1 differs.", [1]),
    laconic.LostWorkerError("step 5: worker 1 did not respond.", [1]),
    *(getattr(laconic, name)("why") for name in ("DesyncError", "DisagreementError", "PlanError")),
]


def test_all_public_errors_are_here():
    assert {type(error).__name__ for error in ERRORS} == {name for name in laconic.__all__ if name.endswith("Error")}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_being_pickled(error):
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - the test's own
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
