"""The formulas, beside cases that were computed by hand."""

from __future__ import annotations

from math import log10

import pytest

import laconic
from laconic.cost import meta
from laconic.ledger import crossing_bytes, wire_bytes
from laconic.plans.plan import Plan
from laconic.tools.launch.links import Level, Link, link
from laconic.tools.planner.network import ComputedNetwork, MeasuredNetwork, Message, timeline
from laconic.tools.planner.predict import Prediction, Scenario
from laconic.tools.planner.probe_data import Timing
from laconic.tools.planner.shapes import Shapes

MB = 1_000_000


def _computed(rate="8mbit", workers=4, latency_s=0.0) -> ComputedNetwork:
    return ComputedNetwork(link(rate, workers), latency_s)


def test_all_reduce():
    """2(p-1) messages of a quarter of 1 MB, at 1 MB/s."""
    assert _computed(latency_s=0.1).seconds("all_reduce", MB, 4) == pytest.approx(6 * (0.1 + 0.25))


def test_other_collectives():
    network = _computed(latency_s=0.1)
    assert network.seconds("all_gather", MB, 4) == pytest.approx(3 * 1.1)
    assert network.seconds("all_to_all", MB, 4) == pytest.approx(3 * (0.1 + 0.25))
    assert network.seconds("all_reduce", MB, 1) == network.seconds("all_reduce", 0, 4) == 0


def test_levels():
    two = Link((Level(2, 80e6), Level(2, 8e6)))
    assert ComputedNetwork(two).seconds("all_reduce", MB, 4) == pytest.approx(1.5)  # the slow level decides
    assert ComputedNetwork(two).seconds("all_reduce", MB, 2) == pytest.approx(0.1)  # neighbours
    # Each of two workers sends half of 1 MB to the other side, over the link that they share, at 1 MB/s.
    assert ComputedNetwork(two).seconds("all_to_all", MB, 4) == pytest.approx(1.0)
    assert ComputedNetwork(two).seconds("all_to_all", MB, 2) == pytest.approx(0.05)
    slow_inside = Link((Level(2, 8e6), Level(2, 80e6)))  # where a worker's own link decides
    assert ComputedNetwork(slow_inside).seconds("all_to_all", MB, 4) == pytest.approx(0.75)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "all_to_all", "broadcast"])
def test_what_leaves_one_worker_and_several(op):
    assert crossing_bytes(op, 1000, 8, unit=1) == wire_bytes(op, 1000, 8)
    assert crossing_bytes(op, 1000, 8, unit=8) == 0
    everyone = {"all_reduce": 1750, "all_gather": 7000, "all_to_all": 4 * 4 * 125, "broadcast": 4 * 1000}
    assert crossing_bytes(op, 1000, 8, unit=4) == everyone[op]


def test_faster_links():
    assert _computed().faster(4).seconds("all_reduce", MB, 4) == pytest.approx(1.5 / 4)
    assert _computed().faster(4).rate_bps == 32e6


def test_a_serial_queue():
    two = [Message(0.5, 0.4), Message(1.0, 0.2)]  # the second waits for nothing, and ends 0.2 s after the step
    assert timeline([two], 1.0).exposed_s == pytest.approx(0.2)
    two = [Message(0.5, 0.8), Message(1.0, 0.2)]
    assert timeline([two], 1.0).exposed_s == pytest.approx(0.5)
    assert timeline([[]], 1.0).utilisation == 1


def test_steps_without_messages_and_delay():
    late = Message(1.0, 2.5, delay=2)  # two steps pass while it travels
    assert timeline([[late], [], [], []], 1.0).total_s == pytest.approx(4.5)
    assert timeline([[], [Message(1.0, 2.5)], [], []], 1.0).total_s == pytest.approx(6.5)
    assert timeline([[late]], 1.0).step_s == pytest.approx(2.5)  # the queue is what limits


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


def _layers(parameters: int, count: int) -> Shapes:
    """Layers of one vector each, sent layer by layer, as published simulations assume."""
    vectors = meta({f"layer{index:02}": (parameters // count,) for index in range(count)})
    return Shapes(vectors, tuple((name,) for name in vectors))


@pytest.mark.parametrize(("all_reduce_s", "utilisation"), [(103, 0.957), (382, 0.856), (469, 0.830)])
def test_intellect_1(all_reduce_s, utilisation):
    """Utilisation of INTELLECT-1 (arXiv:2412.01152): 38 minutes of compute a round of 100 steps."""
    shapes = Shapes(meta({"all": (10**9,)}))
    network = ComputedNetwork(link(f"{32 / all_reduce_s}gbit", 2))  # on which two workers need so long for fp32
    plan = laconic.diloco(period=100, codec=laconic.Exact())
    found = Prediction(plan, Scenario(shapes, 2, network, 38 * 60 / 100)).now.utilisation
    assert found == pytest.approx(utilisation, abs=0.002)


SENT_BITS = 13.33
"""Of each parameter. The bits of a message only scale the rate, so fp32 is sent here."""
STREAMING: dict[Plan, tuple[float, ...]] = {
    laconic.ddp(): (86.8, 152.6, 184.2, 222.3, 569.0),
    laconic.diloco(period=100, codec=laconic.Exact()): (1.4, 6.2, 13.3, 23.3, 86.8),
    laconic.streaming_diloco(100, fragments=8, delay=0, codec=laconic.Exact()): (1.4, 5.2, 9.1, 16.0, 28.1),
    laconic.streaming_diloco(100, fragments=8, delay=1, codec=laconic.Exact()): (1.4, 4.3, 6.2, 9.1, 11.0),
}
LATER = [pytest.param(each, marks=pytest.mark.slow) for each in list(STREAMING)[2:]]


@pytest.mark.parametrize("plan", [*list(STREAMING)[:2], *LATER])
def test_streaming_diloco_table_4(plan):
    """Gbit/s for 50, 80, 90, 95 and 99 % utilisation of a 1B model (arXiv:2501.18512), on a grid of 49 steps."""
    prediction = Prediction(plan, Scenario(_layers(1_000_000_008, 24), 2, _computed("1gbit", 2), 0.1))
    for share, published in zip((0.5, 0.8, 0.9, 0.95, 0.99), STREAMING[plan], strict=True):
        needed = prediction.needs_bps(share)
        assert needed is not None
        needed *= SENT_BITS / 32
        assert -1.05 <= 49 / 4 * log10(needed / 1e9 / published) <= 0.05  # the grid's next value is the published one
