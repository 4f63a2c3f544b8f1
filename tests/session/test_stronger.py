"""Stronger plans: each sends more than the one before, and they end."""

from __future__ import annotations

from itertools import pairwise

import pytest

import laconic
from laconic.guard import strengths

MODEL = {"matrix": (512, 2048), "second": (512, 512), "third": (512, 512), "vector": (512,)}


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
        ("streaming_diloco(period=16, fragments=4)", "streaming_diloco(period=4, fragments=4, codec=Exact())"),
    ],
)
def test_each_sends_more_and_the_last_is_exact_or_frequent(text, last):
    plans = [laconic.plan(text), *strengths(laconic.plan(text))]
    assert plans[-1] == laconic.plan(last)
    assert len(plans) < 16
    for weaker, strong in pairwise(plans):
        assert laconic.sent_bytes(weaker, MODEL) < laconic.sent_bytes(strong, MODEL)


@pytest.mark.parametrize("text", ["ddp()", "alone()", "post_local_sgd(period=1)"])
def test_nothing_is_stronger_than_these(text):
    assert list(strengths(laconic.plan(text))) == []
