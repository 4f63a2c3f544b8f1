"""Schedules: pure functions of the number of a step, and of the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import laconic
from laconic.plans.schedules import (
    GRADIENTS,
    WEIGHTS,
    Every,
    Nested,
    Never,
    Quadratic,
    Schedule,
    Streaming,
    SyncClock,
    Timed,
)

steps = st.integers(1, 200)


@given(start=steps, period=steps)
def test_gradients_before_the_start_then_weights_every_period(start: int, period: int) -> None:
    syncs_by_step = {
        step: Every(period, start, of="weights").syncs_at(step) for step in range(1, start + 3 * period + 1)
    }
    assert all(syncs_by_step[step] == GRADIENTS for step in range(1, start))
    weights = [step for step, syncs in syncs_by_step.items() if syncs == WEIGHTS]
    assert weights == [start - 1 + period * sync for sync in range(1, len(weights) + 1)]
    assert len(weights) >= 3
    assert sum(not syncs for syncs in syncs_by_step.values()) == len(syncs_by_step) - len(weights) - (start - 1)


@given(start=steps, step=st.integers(1, 1000))
def test_period_1_averages_gradients_at_every_step(start: int, step: int) -> None:
    assert Every(1, start).syncs_at(step) == GRADIENTS


def test_what_every_averages_has_one_spelling() -> None:
    assert Every(1, of="gradients") == Every(1) != Every(1, of="weights")
    assert Every(4, of="weights") == Every(4)
    assert repr(Every(1, of="weights")) == "Every(of='weights')"
    with pytest.raises(ValueError, match=r'gradients are averaged at every step, .* Use Every\(1\), or of="weights"'):
        Every(4, of="gradients")
    with pytest.raises(ValueError, match='of must be "gradients" or "weights"'):
        Every(of="deltas")  # type: ignore[arg-type]


@given(step=st.integers(1, 10**6))
def test_never_is_never(step: int) -> None:
    assert Never().syncs_at(step) == () == Never().syncs_at(step, SyncClock(since=0, lr=0.1))


@pytest.mark.parametrize("schedule", [Every(), Every(4), Every(1, start=5), Every(16, 3)], ids=repr)
def test_values(schedule: Schedule) -> None:
    assert copy_of(schedule) == schedule
    assert hash(copy_of(schedule)) == hash(schedule)
    with pytest.raises(AttributeError):
        schedule.period = 2  # type: ignore[misc]


def copy_of(schedule: Schedule) -> Schedule:
    return type(schedule)(period=schedule.period, start=schedule.start)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (Every(), "Every()"),
        (Every(4), "Every(period=4)"),
        (Every(start=2), "Every(start=2)"),
        (Every(16, 3), "Every(period=16, start=3)"),
    ],
)
def test_prints_as_its_code(schedule: Schedule, text: str) -> None:
    assert repr(schedule) == text


@pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, "3", None, True, float("inf"), [1]])
@pytest.mark.parametrize("name", ["start", "period"])
def test_steps_count_from_1(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        Every(**({"start": 1, "period": 1} | {name: value}))
    assert str(error.value) == (
        f"Every({name}={value!r}): {name} must be a whole number of at least 1, as steps count from 1."
    )


@given(start=st.integers(1, 50), step=st.integers(1, 500))
def test_nested_uses_the_largest_period_that_divides_the_step(start: int, step: int) -> None:
    groups = {2: 2, 6: 4, 18: 8}
    syncs = Nested(groups, start).syncs_at(step)
    if step < start:
        assert syncs == GRADIENTS
        return
    due = [size for period, size in groups.items() if (step - start + 1) % period == 0]
    assert [sync.level for sync in syncs] == ([max(due)] if due else [])


@given(period=st.integers(1, 60), fragments=st.integers(1, 60), start=st.integers(1, 20))
def test_each_fragment_is_sent_once_in_a_period_at_its_own_step(period: int, fragments: int, start: int) -> None:
    if fragments > period:
        with pytest.raises(ValueError, match="fragments must be a whole number from 1 to"):
            Streaming(period, fragments, start=start)
        return
    schedule = Streaming(period, fragments, start=start)
    cycle = [schedule.syncs_at(step) for step in range(start + period, start + 2 * period)]
    assert all(len(syncs) <= 1 for syncs in cycle)
    assert sorted(sync.fragment for syncs in cycle for sync in syncs if sync.fragment is not None) == list(
        range(fragments)
    )
    assert [schedule.syncs_at(step + period) for step in range(start, start + period)] == cycle


@given(lr=st.floats(1e-6, 1.0), growth=st.floats(1e-4, 1.0), floor=st.integers(1, 50), since=st.integers(0, 100))
def test_the_quadratic_rule(lr: float, growth: float, floor: int, since: int) -> None:
    schedule = Quadratic(growth, floor)
    period = schedule.period_at(lr)
    assert period >= floor
    assert period in (floor, int((growth / lr) ** 2), int((growth / lr) ** 2 + 1e-9), 2**31)
    clock = SyncClock(since, lr)
    assert schedule.syncs_at(since + period, clock) == WEIGHTS
    assert period == 1 or schedule.syncs_at(since + period - 1, clock) == ()


@given(seconds=st.floats(1e-6, 1e6), elapsed_s=st.floats(0, 2e6), start=st.integers(1, 50), step=st.integers(1, 100))
def test_a_round_by_time(seconds: float, elapsed_s: float, start: int, step: int) -> None:
    due = GRADIENTS if step < start else WEIGHTS if elapsed_s >= seconds else ()
    assert Timed(seconds, start).syncs_at(step, SyncClock(0, elapsed_s=elapsed_s)) == due


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Nested({}), "groups must map periods to numbers of workers"),
        (lambda: Nested({4: 2, 2: 4}), "period 2 follows 4"),
        (lambda: Nested({0: 2}), "period must be a whole number of at least 1"),
        (lambda: Nested({2: 4, 4: 2}), "groups of 2 follow groups of 4"),
        (lambda: Nested({2: 2, 4: 3}), "groups of 3 follow groups of 2"),
        (lambda: Nested({2: 0}), "a group must have at least 1 worker"),
        (lambda: Nested(4), "groups must map periods"),  # type: ignore[arg-type]
        (lambda: Quadratic(0), "growth must be a number above 0"),
        (lambda: Quadratic(0.1, floor=0), "floor must be a whole number"),
        (lambda: Timed(0), r"Timed\(seconds=0\): seconds must be a number above 0, such as 30"),
        (lambda: Timed("30s"), r"Timed\(seconds='30s'\): seconds must be a number above 0"),  # type: ignore[arg-type]
        (lambda: Timed(30, start=0), r"Timed\(start=0\): start must be a whole number"),
        (lambda: laconic.diloco(every="30"), "every='30': the time of a round is a number and a unit.*\"30s\""),
        (lambda: laconic.diloco(every=30), "every=30: the time of a round is a number and a unit"),  # type: ignore[arg-type]
        (lambda: laconic.diloco(period=8, every="30s"), r"diloco\(period=8, every='30s'\): .*Give one of them"),
        (lambda: laconic.diloco(every="30s", group=4), r"group average gradients.*diloco\(period=16, group=4\)"),
        (lambda: Streaming(4, 2, delay=4), "delay must be a whole number from 0 to 3"),
        (lambda: Streaming(4, 2, mix=1.0), "from 0 to below 1"),
    ],
)
def test_invalid_schedules_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
