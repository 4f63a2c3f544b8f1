"""Honest trainings, composed at random, hold all promises: a fixed set of examples here, fresh ones every night."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.machine import Training
from tests.property.plans import DEFAULTS, PLANS
from tests.property.programs import Setup

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


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("plan", DEFAULTS)
def test_what_a_default_plan_holds_back_is_in_its_residuals(plan):
    training = Training()
    setup = Setup(plan, workers=3, wrap="bare" if PLANS[plan].local else "ddp", features=frozenset({"wide"}))
    try:
        training.attach(setup=setup)
        training.plain_steps(count=2 * max(4, setup.known.period))
        training.resume()  # with a fragment in flight
        training.plain_steps(count=max(2, setup.known.delay + 1))
        training.change(plan="ddp")
        training.plain_steps(count=1)
    finally:
        training.teardown()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_fresh_trainings_every_night():
    number = random.SystemRandom().randrange(1 << 32)
    print(f"seed {number}")  # noqa: T201
    fresh = seed(number)(type("Fresh", (Training,), {}))
    run_state_machine_as_test(fresh, settings=settings(COMMON, max_examples=500, phases=(Phase.generate, Phase.shrink)))
