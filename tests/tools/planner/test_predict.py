"""Predictions: what follows from the formulas for a plan, and the advice."""

from __future__ import annotations

import pytest

import laconic
from laconic.tools.errors import UsageError
from laconic.tools.launch.links import link
from laconic.tools.planner.network import ComputedNetwork
from laconic.tools.planner.predict import PLANS, Forecast, Prediction, Scenario
from laconic.tools.planner.shapes import Shapes, adapters, from_count, from_module

MODEL = from_count(1_000_000)


def _scenario(rate="100mbit", compute_s=0.1, **options) -> Scenario:
    return Scenario(MODEL, 4, ComputedNetwork(link(rate, 4)), compute_s, **options)


def _of(text: str, **options) -> Prediction:
    return Prediction(laconic.plan(text), _scenario(**options))


def test_ddp_by_hand():
    found = _of("ddp()")
    assert found.sent_bytes_per_step == 1.5 * 4_000_000
    assert found.step_s == pytest.approx(0.1 + 0.48)  # one bucket, which is released at the end of backward
    assert found.now.utilisation == pytest.approx(0.1 / 0.58)
    assert found.memory_bytes == 0
    assert found.needs_bps(0.5) == pytest.approx(480e6, rel=1e-3)


def test_local_plans_by_hand():
    exact = _of("diloco(period=4, lr=0.7, momentum=0.9, codec=Exact())")
    control = (40 + 16) * 1.5  # a header and a digest, each in an all_reduce
    assert exact.sent_bytes_per_step == (6_000_000 + control) / 4
    assert exact.step_s == pytest.approx(0.1 + (0.48 + control * 8 / 1e8) / 4)
    assert exact.memory_bytes == 2 * 4_000_000  # the anchor and the momentum
    assert _of("diloco()").memory_bytes == 2 * 4_000_000  # the anchor and the residuals
    assert _of("alone()").step_s == pytest.approx(0.1) and _of("alone()").needs_bps(0.99) == 0


def test_streaming_hides_what_fits_into_its_delay():
    exposed = [
        _of(f"streaming_diloco(period=8, fragments=4, delay={n}, codec=Exact())").now.exposed_s for n in (0, 1, 2)
    ]
    assert exposed[0] == pytest.approx(0.48 / 8, rel=0.01)
    assert exposed[1] < exposed[0] / 4 and exposed[2] < 1e-3


def test_layers_are_sent_during_backward():
    whole = Scenario(from_count(1_000_000), 4, ComputedNetwork(link("1gbit", 4)), 0.1)
    parts = Scenario(from_count(1_000_000, layers=10), 4, ComputedNetwork(link("1gbit", 4)), 0.1)
    last = 0.048 / 10
    assert Prediction(laconic.ddp(), parts).now.exposed_s == pytest.approx(last, rel=0.01)
    assert Prediction(laconic.ddp(), whole).now.exposed_s == pytest.approx(0.048, rel=0.01)
    bare = Scenario(from_count(1_000_000, layers=10), 4, ComputedNetwork(link("1gbit", 4)), 0.1, bare=True)
    assert Prediction(laconic.ddp(), bare).now.exposed_s == pytest.approx(0.048, rel=0.01)


def test_codec_time_makes_a_break_even():
    plan = laconic.quantized_ddp()
    costly = Prediction(plan, _scenario(codec_s={plan: 0.05}))
    free = Prediction(plan, _scenario())
    assert costly.step_s == pytest.approx(free.step_s + 0.05)
    rate, other = costly.break_even_bps(_of("ddp()")), free.break_even_bps(_of("ddp()"))
    assert rate is not None and other is not None and rate < other / 5
    faster = rate / 1e8
    assert costly.timeline(faster).step_s * (costly.steps_factor or 0) == pytest.approx(
        _of("ddp()").timeline(faster).step_s, rel=1e-3
    )
    assert costly.needs_bps(0.99) is None  # no link is fast enough
    unknown = _of("diloco(period=8, momentum=0.9)")
    assert unknown.break_even_bps(_of("ddp()")) is None  # nothing is known that it costs


def test_progress_lies_between_ddp_and_alone():
    assert _of("ddp()").steps_factor == 1
    assert _of("alone()").steps_factor == pytest.approx(4**0.75)
    some = _of("frugal('120x')")
    assert some.kept is not None and 0.2 < some.kept < 1
    assert some.steps_factor == pytest.approx(1 / (some.kept + (1 - some.kept) / 4**0.75))
    assert _of("diloco(period=8, momentum=0.9)").steps_factor is None


@pytest.mark.slow
def test_advice():
    def advised(*plans: str, **options) -> str:
        return Forecast([laconic.plan(text) for text in plans] or PLANS, _scenario(**options)).advice

    assert advised(rate="100gbit", compute_s=1.0).startswith("Do not compress: under ddp() workers compute 100%")
    assert advised(rate="100mbit").startswith("Use ") and "times sooner than alone()" in advised(rate="100mbit")
    assert advised(rate="10kbit", compute_s=0.01).startswith("Do not train together over this link")
    assert "what it does to the loss was not measured" in advised("diloco(period=7, momentum=0.9)", "ddp()")
    assert advised("ddp()").endswith("No other plan was given.")


def test_ranked_by_the_time_to_the_same_loss():
    forecast = Forecast((*PLANS, laconic.diloco(period=7, momentum=0.9)), _scenario())
    found = [each.loss_s for each in forecast.ranked]
    assert found[-1] is None and found[:-1] == sorted(s for s in found if s is not None)


def test_shapes():
    assert from_count(12_345, layers=7).parameters == 12_345
    assert len(from_count(12_345, layers=7).layers) == 7
    base = from_count(100_000, layers=3)
    for trainable, matrices in ((9_999, 24), (17, 0)):  # 17 are too few for a rank of 1
        made = adapters(base, trainable)
        assert made.parameters == trainable and sum(t.dim() > 1 for t in made.tensors.values()) == matrices
    assert from_module("tests.tools.planner.test_predict:_made").parameters == 6
    for bad in ("nowhere", "no.such:thing", "laconic:ddp"):
        with pytest.raises(UsageError, match=f"--model {bad}"):
            from_module(bad)


def _made():
    from torch import nn

    return nn.Linear(2, 2)


def test_a_plan_of_machines_needs_their_size():
    with pytest.raises(ValueError, match="how many workers a machine has"):
        _of("post_local_sgd(group='machine')")
    assert _of("post_local_sgd(group='machine')", machine=2).sent_bytes_by_level.keys() == {"groups of 2", "world"}


def test_shapes_of_a_module_keep_their_order():
    shapes = Shapes(MODEL.tensors)
    assert shapes.before(list(MODEL.tensors)[:1]) == 0
    assert 0.9 < shapes.before(list(MODEL.tensors)[-5:]) < 1


@pytest.mark.parametrize(("noise", "gain"), [(None, 4**0.75), (0.0, 1.0), (9.0, 10 / 3.25), (1e6, 4.0)])
def test_noise_tells_what_workers_gain(noise, gain):
    assert _scenario(noise=noise).gain() == pytest.approx(gain, rel=1e-5)
    alone = _of("alone()", noise=noise)
    assert alone.steps_factor == pytest.approx(gain, rel=1e-5)  # by itself: kept is 0


@pytest.mark.parametrize("rate", ["1mbit", "100gbit"])
def test_without_noise_workers_should_train_alone_whatever_the_link(rate):
    found = Forecast(PLANS, _scenario(rate, noise=0.15))
    assert found.advice.startswith("Train by alone(): under a noise of 0.15, 4 workers are worth at most 1.11 that")
    assert found.as_json()["noise"] == 0.15
    assert "Train by alone()" not in Forecast(PLANS, _scenario(rate, noise=0.3)).advice
    assert "Train by alone()" not in Forecast(PLANS, _scenario(rate)).advice
