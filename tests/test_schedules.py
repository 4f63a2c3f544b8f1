"""Schedules: pure functions of the step's number."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.schedules import GRADIENTS, WEIGHTS, Every, PostLocal, Schedule

steps = st.integers(1, 200)


@given(start=steps, period=steps)
def test_gradients_before_the_start_then_weights_every_period(start: int, period: int) -> None:
    talks = {step: PostLocal(start, period).at(step) for step in range(1, start + 3 * period + 1)}
    assert all(talks[step] == GRADIENTS for step in range(1, start))
    weights = [step for step, turns in talks.items() if turns == WEIGHTS]
    assert weights == [start - 1 + period * turn for turn in range(1, len(weights) + 1)]
    assert len(weights) >= 3
    assert sum(not turns for turns in talks.values()) == len(talks) - len(weights) - (start - 1)


@given(start=steps, period=st.integers(2, 200), step=st.integers(1, 1000))
def test_every_longer_period_is_post_local(start: int, period: int, step: int) -> None:
    assert Every(period, start).at(step) == PostLocal(start, period).at(step)


@given(start=steps, step=st.integers(1, 1000))
def test_every_step_talks_about_gradients(start: int, step: int) -> None:
    assert Every(1, start).at(step) == GRADIENTS


def test_post_local_with_period_1_averages_weights_at_every_step() -> None:
    assert [PostLocal(1, 1).at(step) for step in (1, 2, 3)] == [WEIGHTS] * 3


@pytest.mark.parametrize("schedule", [Every(), Every(4), Every(1, start=5), PostLocal(3, 16)], ids=repr)
def test_values(schedule: Schedule) -> None:
    assert eval_free_copy(schedule) == schedule
    assert hash(eval_free_copy(schedule)) == hash(schedule)
    with pytest.raises(AttributeError):
        schedule.period = 2  # type: ignore[misc]


def eval_free_copy(schedule: Schedule) -> Schedule:
    return type(schedule)(period=schedule.period, start=schedule.start)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (Every(), "Every()"),
        (Every(4), "Every(period=4)"),
        (Every(start=2), "Every(start=2)"),
        (PostLocal(1, 16), "PostLocal(start=1, period=16)"),
    ],
)
def test_prints_as_its_code(schedule: Schedule, text: str) -> None:
    assert repr(schedule) == text


@pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, "3", None, True, float("inf"), [1]])
@pytest.mark.parametrize("word", ["start", "period"])
@pytest.mark.parametrize("kind", [Every, PostLocal])
def test_steps_count_from_1(kind: type[Every] | type[PostLocal], word: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        kind(**({"start": 1, "period": 1} | {word: value}))
    assert str(error.value) == (
        f"{kind.__name__}({word}={value!r}): {word} must be a whole number of at least 1, as steps count from 1."
    )
