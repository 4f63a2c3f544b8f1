"""Stronger plans: each sends more than the one before, and they end."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import get_type_hints

import pytest

import laconic
from laconic.codecs import Exact
from laconic.cost import facts_of
from laconic.guard import strengths
from laconic.plans import methods
from laconic.plans.plan import Plan

MODEL = {"matrix": (512, 2048), "second": (512, 512), "third": (512, 512), "vector": (512,)}


def _plan(text):
    return laconic.plan(text).resolved(facts_of(MODEL, 4))


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("power_sgd(rank=1, bits=2)", "ddp()"),
        ('power_sgd(rank=4, rounds="alternating", bits=None)', "ddp()"),
        ("Plan(codec=ErrorFeedback(codec=Quantized(bits=1)))", "ddp()"),
        ("Plan(codec=ErrorFeedback(codec=Quantized(1)))", "ddp()"),
        ("Plan(codec=ErrorFeedback(codec=TopK(fraction=0.03, bits=2)))", "ddp()"),
        ('Plan(codec=ByName({"vector": Exact()}, rest=ErrorFeedback(Quantized(bits=2))))', "ddp()"),
        ("post_local_sgd(period=16)", "post_local_sgd(period=1)"),
        ("diloco(period=8, codec=ErrorFeedback(codec=Quantized(bits=2)))", "diloco(period=1, codec=Exact())"),
        ("Plan(codec=ErrorFeedback(codec=Cast('bf16')))", "ddp()"),
        ("streaming_diloco(period=16, fragments=4)", "Plan(Streaming(1, 1))"),
        ('frugal("120x", delay=1)', "Plan(Streaming(1, 1))"),
        ('frugal("300x")', "Plan(Streaming(1, 1))"),
        ("Plan(Streaming(12, 2, delay=11), ErrorFeedback(Quantized(1)))", "Plan(Streaming(1, 1))"),
        ("hierarchical_sgd({4: 2, 16: 4})", "hierarchical_sgd({1: 4})"),
        ("hierarchical_sgd({1: 2, 3: 4})", "hierarchical_sgd({1: 4})"),
    ],
)
def test_each_sends_more_and_the_last_is_exact_or_frequent(text, last):
    plan = _plan(text)
    plans = [plan, *strengths(plan)]
    assert plans[-1] == laconic.plan(last)
    assert len(plans) < 16
    for weaker, strong in pairwise(plans):
        assert laconic.sent_bytes(weaker, MODEL, 4) < laconic.sent_bytes(strong, MODEL, 4)


NAMED = {
    "ddp": [],
    "alone": [],
    "power_sgd": ["rank=48", "bits=None, feedback=False, start=3"],
    "quantized_ddp": ["bits=1"],
    "post_local_sgd": ["", "group=2, period=3, start=5"],
    "hierarchical_sgd": ["{4: 2, 16: 4}"],
    "diloco": ["", "group=2", "codec=Quantized(1)"],
    "streaming_diloco": ["", "mix=0.5, delay=3, codec=ErrorFeedback(Quantized(1))"],
    "qsr": ["0.02"],
    "demo": ["", "bits=2, fraction=0.01"],
    "sparse_loco": ["", "period=1"],
    "frugal": ['"2x"', '"8x"', '"16x"', '"120x", delay=1', '"1000x"'],
}
STRONGEST = {"ddp", "alone"}


def test_all_named_plans_are_here():
    functions = inspect.getmembers(methods, inspect.isfunction)
    assert {name for name, f in functions if get_type_hints(f).get("return") is Plan} == set(NAMED)


@pytest.mark.parametrize(
    "text", [f"{name}({arguments})" for name, several in NAMED.items() for arguments in several or [""]]
)
def test_every_named_plan_has_stronger_ones_up_to_exact_ones_of_all_weights_or_gradients_at_every_step(text):
    plan = _plan(text)
    found = list(strengths(plan))
    assert bool(found) == (text.removesuffix("()") not in STRONGEST)
    assert len(found) < 16
    sent = [laconic.sent_bytes(each, MODEL, 4) for each in (plan, *found)]
    assert sent == sorted(sent) and len(set(sent)) == len(sent)
    for each in found:
        assert laconic.plan(repr(each)) == each
        assert each.schedule.start == plan.schedule.start and each.outer == plan.outer
    if found:
        assert found[-1].codec == Exact() and found[-1].schedule.period == 1


@pytest.mark.parametrize("text", ["ddp()", "alone()", "post_local_sgd(period=1)"])
def test_nothing_is_stronger_than_these(text):
    assert list(strengths(laconic.plan(text))) == []
