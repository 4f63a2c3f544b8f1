"""The formulas, beside cases that were computed by hand."""

from __future__ import annotations

from math import exp, log10, sqrt

import pytest

import laconic
from laconic.tools.launch.links import Level, Link, link
from laconic.tools.planner.collectives import Formula, hierarchical_s
from laconic.tools.planner.faults import checkpoint_every_s, goodput, slowest_of, straggling_s
from laconic.tools.planner.measured_network import MeasuredNetwork
from laconic.tools.planner.predict import Prediction, Scenario
from laconic.tools.planner.probe_data import Timing
from laconic.tools.planner.shapes import from_count
from laconic.tools.planner.timeline import Message, timeline

MB = 1_000_000


def _formula(rate="8mbit", workers=4, latency_s=0.0, algorithm="ring") -> Formula:
    return Formula(link(rate, workers), latency_s, algorithm)


@pytest.mark.parametrize(
    ("algorithm", "seconds"),
    [
        ("ring", 6 * (0.1 + 0.25)),  # 2(p-1) messages of a quarter of 1 MB, at 1 MB/s
        ("halving-doubling", 2 * 2 * 0.1 + 1.5),
        ("tree", 2 * 2 * 0.1 + 2.0),
        ("hierarchical", 6 * (0.1 + 0.25)),  # one level: a ring
    ],
)
def test_all_reduce(algorithm, seconds):
    assert _formula(latency_s=0.1, algorithm=algorithm).seconds("all_reduce", MB, 4) == pytest.approx(seconds)


def test_other_collectives():
    network = _formula(latency_s=0.1)
    assert network.seconds("all_gather", MB, 4) == pytest.approx(3 * 1.1)
    assert network.seconds("all_to_all", MB, 4) == pytest.approx(3 * (0.1 + 0.25))
    assert network.seconds("all_reduce", MB, 1) == network.seconds("all_reduce", 0, 4) == 0


def test_levels():
    two = Link((Level(2, 80e6), Level(2, 8e6)))
    assert Formula(two).seconds("all_reduce", MB, 4) == pytest.approx(1.5)  # the slow level decides
    assert Formula(two).seconds("all_reduce", MB, 2) == pytest.approx(0.1)  # neighbours
    inside, between = 2 * (0.1 + 0.5 * 8e6 / 80e6), 2 * (0.1 + 0.25)
    assert hierarchical_s(8e6, two, 0.1) == pytest.approx(inside + between)


def test_faster_links():
    assert _formula().faster(4).seconds("all_reduce", MB, 4) == pytest.approx(1.5 / 4)
    assert _formula().faster(4).rate_bps == 32e6


def test_a_serial_queue():
    two = [Message(0.5, 0.4), Message(1.0, 0.2)]  # the second waits for nothing, and ends 0.2 s after the step
    assert timeline([two], 1.0).exposed_s == pytest.approx(0.2)
    two = [Message(0.5, 0.8), Message(1.0, 0.2)]
    assert timeline([two], 1.0).exposed_s == pytest.approx(0.5)
    assert timeline([[]], 1.0).utilisation == 1


def test_silent_steps_and_delay():
    late = Message(1.0, 2.5, delay=2)  # two steps pass while it travels
    assert timeline([[late], [], [], []], 1.0).total_s == pytest.approx(4.5)
    assert timeline([[], [Message(1.0, 2.5)], [], []], 1.0).total_s == pytest.approx(6.5)
    assert timeline([[late]], 1.0).step_s == pytest.approx(2.5)  # the queue is what limits


def test_stragglers_and_faults():
    assert slowest_of(1) == 0 and 2.2 < slowest_of(64) < 2.5
    assert straggling_s(64, 2.0, 0.1, period=16) == pytest.approx(slowest_of(64) * 0.1 * 2.0 / 4)
    assert goodput(10.9, 60) == pytest.approx(exp(-10.9 / 60))
    assert goodput(10.9, None) == 1
    assert checkpoint_every_s(10, 2000) == sqrt(40_000)


def _timings(op: str, seconds_of) -> list[Timing]:
    return [Timing(op, "world", 4, size, (seconds_of(size),)) for size in (1000, 10_000, 100_000, MB)]


def test_a_measured_network():
    timings = _timings("all_reduce", lambda n: 6 * 1e-3 + 1.5 * n * 8 / 8e6)
    network = MeasuredNetwork(timings, 4)
    assert network.seconds("all_reduce", 10_000, 4) == pytest.approx(6e-3 + 0.015)
    assert network.seconds("all_reduce", 1, 4) == pytest.approx(7.5e-3)  # the smallest that was measured
    assert network.seconds("all_reduce", 3 * MB, 4) == pytest.approx(6e-3 + 4.5, rel=1e-3)
    assert network.rate_bps == pytest.approx(8e6, rel=1e-3)
    assert network.faster(10).seconds("all_reduce", MB, 4) == pytest.approx(6e-3 + 0.15, rel=1e-2)
    with pytest.raises(ValueError, match="no all_gather among 4 workers, only among"):
        network.seconds("all_gather", MB, 4)
    with pytest.raises(ValueError, match="--groups 2"):
        network.seconds("all_reduce", MB, 2)


# What others have published.


@pytest.mark.parametrize(("all_reduce_s", "utilisation"), [(103, 0.957), (382, 0.856), (469, 0.830)])
def test_intellect_1(all_reduce_s, utilisation):
    """Utilisation of INTELLECT-1 (arXiv:2412.01152): 10 B parameters, 38 minutes of compute a round."""
    bits = all_reduce_s * 1e9 / 10e9  # of each parameter, so that two workers need so long at 1 Gbit/s
    scenario = Scenario(from_count(10**10), 2, _formula("1gbit", 2), 38 * 60 / 100, payload_bits=bits)
    found = Prediction(laconic.diloco(period=100), scenario).now.utilisation
    assert found == pytest.approx(utilisation, abs=0.002)


STREAMING = {
    "ddp()": (86.8, 152.6, 184.2, 222.3, 569.0),
    "diloco(period=100)": (1.4, 6.2, 13.3, 23.3, 86.8),
    "streaming_diloco(period=100, fragments=8, delay=0)": (1.4, 5.2, 9.1, 16.0, 28.1),
    "streaming_diloco(period=100, fragments=8, delay=1)": (1.4, 4.3, 6.2, 9.1, 11.0),
}


LATER = [pytest.param(each, marks=pytest.mark.slow) for each in list(STREAMING)[2:]]


@pytest.mark.parametrize("text", [*list(STREAMING)[:2], *LATER])
def test_streaming_diloco_table_4(text):
    """Gbit/s for 50, 80, 90, 95 and 99 % utilisation of a 1B model (arXiv:2501.18512), on a grid of 49 steps."""
    shapes = from_count(10**9, layers=24, flat=True)
    prediction = Prediction(laconic.plan(text), Scenario(shapes, 2, _formula("1gbit", 2), 0.1, payload_bits=13.33))
    for share, published in zip((0.5, 0.8, 0.9, 0.95, 0.99), STREAMING[text], strict=True):
        needed = prediction.needs_bps(share)
        assert needed is not None
        assert -1.05 <= 49 / 4 * log10(needed / 1e9 / published) <= 0.05  # the grid's next value is the published one
