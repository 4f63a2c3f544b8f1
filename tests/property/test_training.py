"""Honest trainings, composed at random, hold all promises: a fixed set of examples here, fresh ones every night."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.machine import Training

COMMON = settings(
    database=None,
    deadline=None,
    stateful_step_count=12,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trainings_of_random_features_hold_all_promises():
    run_state_machine_as_test(Training, settings=settings(COMMON, max_examples=40, derandomize=True))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_fresh_trainings_every_night():
    number = random.SystemRandom().randrange(1 << 32)
    print(f"seed {number}")  # noqa: T201
    fresh = seed(number)(type("Fresh", (Training,), {}))
    run_state_machine_as_test(fresh, settings=settings(COMMON, max_examples=500, phases=(Phase.generate, Phase.shrink)))
