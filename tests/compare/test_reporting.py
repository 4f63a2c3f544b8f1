"""What a run tells, and when it is enough: the same on every worker."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from laconic.compare.links import link
from laconic.compare.reporting import CHECKED_EVERY, Goal, Progress, Reporting, Watch, control_group
from tests.workers import run_workers

NOW = Progress(worker=0, step=1, steps=4, loss=2.0, tokens_per_s=10.0, sent_bytes=5, seconds=2.0)


def alone(goal: Goal, ledger: Watch | None = None) -> Reporting:
    return Reporting(lambda _: None, Watch() if ledger is None else ledger, goal, control=None)


def test_time_left():
    assert NOW.seconds_left == 6.0
    assert replace(NOW, step=4).seconds_left == 0.0
    assert replace(NOW, steps=0).seconds_left == 0.0
    assert replace(NOW, seconds_limit=5.0).seconds_left == 3.0
    assert replace(NOW, steps=0, seconds_limit=5.0).seconds_left == 3.0
    assert replace(NOW, ended="loss").seconds_left == 0.0


def test_steps_end_a_run():
    reporting = alone(Goal(steps=3))
    assert [reporting.step(step, 1.0, 0).ended for step in (1, 2, 3)] == ["", "", "steps"]


def test_a_loss_ends_a_run_once_its_mean_is_there_and_at_a_check():
    reporting = alone(Goal(steps=100, loss=1.0))
    losses = [3.0] * 8 + [0.5] * 8
    endings = [reporting.step(step, loss, 0).ended for step, loss in enumerate(losses, start=1)]
    assert endings.index("loss") + 1 == 16  # at step 12 the mean of the last eight is still 1.75
    assert 16 % CHECKED_EVERY == 0


def test_seconds_end_a_run():
    reporting = alone(Goal(seconds=1e-9))
    assert [reporting.step(step, 1.0, 0).ended for step in (1, 2, 3, 4)] == ["", "", "", "seconds"]


def test_the_last_step_may_reach_the_loss():
    assert alone(Goal(steps=1, loss=2.0)).step(1, 1.5, 0).ended == "loss"


def test_a_loss_that_is_no_number_reaches_nothing():
    assert alone(Goal(steps=4, loss=2.0)).step(4, float("nan"), 0).ended == "steps"


def test_time_in_flight_counts_once():
    watch = Watch()
    time.sleep(0.02)
    watch.record("all_reduce", 100, 2, phase="gradient", seconds=0.02)
    watch.record("all_reduce", 100, 2, phase="gradient", seconds=0.02)  # in flight at the same time
    assert watch.seconds == pytest.approx(0.04)
    assert 0.02 <= watch.busy_s < 0.03


def test_a_computed_link_moves_the_clock():
    watch = Watch(computed=link("8mbit", workers=2))
    reporting = alone(Goal(seconds=100.0), watch)
    watch.record("all_reduce", 1_000_000, 2, phase="gradient")
    told = reporting.step(1, 1.0, tokens=8)
    assert 1.0 <= told.seconds < 2.0
    assert (told.wire_bytes, told.sent_bytes, told.level_bytes) == (1_000_000, 1_000_000, {"world": 1_000_000})
    assert told.link_s == pytest.approx(1.0)
    assert told.talking_s == pytest.approx(1.0)
    assert told.framing_bytes > 0


def stop_together(worker: int) -> tuple[int, int]:
    group = dist.group.WORLD
    ledger = Watch()
    reporting = Reporting(lambda _: None, ledger, Goal(steps=100, loss=1.5), control_group(group))
    for step in range(1, 101):
        if reporting.step(step, 1.0 if worker == 0 else 1.0 + 10 / step, 0).ended:
            return step, ledger.collectives
    return 0, 0


def test_workers_stop_at_the_same_step_and_agreeing_is_not_in_the_ledger():
    ends = run_workers(stop_together, workers=3)
    assert len(set(ends)) == 1
    assert ends[0][0] % CHECKED_EVERY == 0
    assert ends[0][0] > CHECKED_EVERY
    assert ends[0][1] == 0
