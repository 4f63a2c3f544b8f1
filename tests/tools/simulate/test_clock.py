"""The virtual clock: hand-computed times, and the clock alone against predictions and simulated trainings."""

from __future__ import annotations

import pytest

import laconic
from laconic.cost import meta
from laconic.tools.errors import UsageError
from laconic.tools.lab.tasks import Lab
from laconic.tools.launch.links import link
from laconic.tools.planner.network import ComputedNetwork
from laconic.tools.planner.predict import Prediction, Scenario
from laconic.tools.planner.shapes import Shapes, from_count
from laconic.tools.simulate.clock import Conditions, TimeOnly, TimeUse, VirtualClock
from laconic.tools.simulate.in_process import Collective
from laconic.tools.simulate.training import SimulatedRun, Training, lab_task

MBIT = ComputedNetwork(link("8mbit", workers=2))  # a megabyte a second


def _sent(size: int, phase: str = "weights", step: int = 1) -> Collective:
    return Collective("all_reduce", size, phase, step)


def test_workers_wait_for_the_slowest_and_for_the_link():
    clock = VirtualClock(2, Conditions(1.0, network=MBIT), overlap=False)
    for worker, steps in ((0, 3), (1, 1)):
        for step in range(1, steps + 1):
            clock.compute(worker, step)
    clock.served((0, 1), [_sent(500_000)])  # half a second: each sends half of it twice
    assert clock.now == [3.5, 3.5]
    assert clock.use() == TimeUse(computing=4 / 7, stragglers=2 / 7, link=1 / 7, faults=0.0)


def test_gradients_are_sent_during_backward():
    clock = VirtualClock(2, Conditions(3.0, network=MBIT), overlap=True)
    for worker in range(2):
        clock.compute(worker, 1)
    # Backward takes 2 of the 3 s. The first bucket is ready after half of it and sent by 3.0, the second by 4.0.
    clock.served((0, 1), [_sent(1_000_000, "gradient"), _sent(1_000_000, "gradient")])
    assert clock.now == pytest.approx([4.0, 4.0])


def test_a_fragment_with_a_delay_is_waited_for_when_it_is_due():
    clock = VirtualClock(2, Conditions(1.0, network=MBIT), overlap=False, delay=2)
    for step in range(1, 4):
        for worker in range(2):
            clock.compute(worker, step)
            clock.after_step(worker, step)
        if step == 1:
            clock.served((0, 1), [_sent(2_500_000)])
            assert clock.now == [1.0, 1.0]
    assert clock.now == pytest.approx([3.5, 3.5])


def test_undone_steps_cost_their_time():
    clock = VirtualClock(2, Conditions(1.0), overlap=False)
    for step in range(1, 4):
        clock.compute(0, step)
    clock.compute(1, 1)
    clock.rewind((0,), step=1)
    assert clock.use() == TimeUse(computing=0.5, stragglers=0.0, link=0.0, faults=0.5)


@pytest.mark.parametrize(
    "plan",
    ["ddp()", "power_sgd(rank=4)", "diloco(period=4)", "streaming_diloco(period=4, fragments=2, delay=1)", "alone()"],
)
def test_without_jitter_the_clock_alone_is_the_prediction(plan):
    shapes, network, parsed = from_count(3_000_000), ComputedNetwork(link("50mbit", workers=8)), laconic.plan(plan)
    expected = Prediction(parsed, Scenario(shapes, 8, network, 0.1))
    clock = TimeOnly(parsed, shapes, 8, Conditions(0.1, network=network))
    before, after = clock.run(80).seconds, clock.run(80).seconds
    assert (after - before) / 80 == pytest.approx(expected.step_s, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp()", "diloco(period=2)"])
def test_the_clock_alone_agrees_with_a_simulated_training(plan):
    settings = Lab(layers=1, width=32, context=16, batch=2)
    given = Conditions(0.01, network=ComputedNetwork(link("10mbit", workers=3)))
    task = lab_task(settings)
    shapes = Shapes(meta(task.model))
    steps = list(Training(SimulatedRun(laconic.plan(plan), 3, 6, conditions=given), task).steps())
    alone = TimeOnly(laconic.plan(plan), shapes, 3, given).run(6)
    assert steps[-1].seconds == pytest.approx(alone.seconds, rel=0.05)
    assert steps[-1].sent_bytes == pytest.approx(alone.sent_bytes, rel=0.05)


def test_stragglers_cost_less_where_workers_synchronise_less_often():
    shapes = from_count(1000)
    given = Conditions(1.0, jitter=0.2)
    lost = [
        TimeOnly(laconic.plan(plan), shapes, 1000, given).run(64).use.stragglers
        for plan in ("ddp()", "diloco(period=16)", "alone()")
    ]
    assert lost[0] == pytest.approx(0.2 * 3.24 / (1 + 0.2 * 3.24), rel=0.05)  # the slowest of 1000: 3.24 deviations
    assert lost[1] == pytest.approx(0.2 * 3.24 / 4 / (1 + 0.2 * 3.24 / 4), rel=0.1)
    assert lost[2] == 0


def test_groups_must_divide_the_workers():
    with pytest.raises(UsageError, match="groups of 4, and 6 workers"):
        TimeOnly(laconic.plan("post_local_sgd(period=2, group=4)"), from_count(1000), 6, Conditions(1.0))


@pytest.mark.slow
def test_a_hundred_thousand_workers():
    given = Conditions(0.05, jitter=0.1, network=ComputedNetwork(link("200mbit", workers=100_000)))
    outcome = TimeOnly(laconic.plan("diloco()"), from_count(1_000_000), 100_000, given).run(32)
    assert 0.2 < outcome.use.computing < 0.9
    assert sum(vars(outcome.use).values()) == pytest.approx(1)
