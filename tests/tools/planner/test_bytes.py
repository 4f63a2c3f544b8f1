"""Planned bytes are the bytes of the ledger, for every codec and schedule: the codec itself is run to plan them."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import laconic
from laconic.cost import cycle_of
from laconic.tools.launch.links import link
from laconic.tools.planner.network import ComputedNetwork
from laconic.tools.planner.predict import Prediction, Scenario
from laconic.tools.planner.shapes import Shapes
from tests.workers import run_workers

CODECS = (
    "Exact()",
    "Cast('bf16')",
    "ErrorFeedback(Quantized(8))",
    "ErrorFeedback(Quantized(4, block=64))",
    "ErrorFeedback(Quantized(2))",
    "ErrorFeedback(Quantized(1))",
    "ErrorFeedback(LowRank(rank=2))",
    "ErrorFeedback(LowRank(rank=2, rounds='alternating'))",
    "ByShape(ErrorFeedback(LowRank(rank=4, bits=4)), rest=ErrorFeedback(Quantized(4)))",
    "ErrorFeedback(TopDCT(0.05, chunk=16), decay=0.9)",
    "ByShape(ErrorFeedback(TopK(0.06, bits=2), decay=0.95), rest=ErrorFeedback(Quantized(4)))",
)
SCHEDULES = (
    "Every(1)",
    "Every(1, of='weights')",
    "Every(3)",
    "Every(2, 3)",
    "Streaming(4, 2)",
    "Streaming(4, 2, delay=1)",
)
METHODS = (
    "ddp()",
    "alone()",
    "power_sgd()",
    "demo()",
    "diloco(period=2, lr=0.7, momentum=0.9, group=2)",
    "post_local_sgd(period=2, group=2)",
    "hierarchical_sgd({1: 2, 2: 4})",
    "sparse_loco()",
    "sparse_loco(group=2)",
    "frugal('120x')",
    "frugal('30x', group=2)",
    "frugal('60x', delay=1, group=2)",
)


def _model(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    last = nn.Sequential(nn.BatchNorm1d(17), nn.Linear(17, 5)) if norm else nn.Linear(17, 5)
    return nn.Sequential(nn.Linear(33, 40), nn.Linear(40, 17, bias=False), last)


def _sent(worker: int, texts: tuple[str, ...], norm: bool) -> list[dict[str, int]]:
    """Return the bytes of one cycle of each plan, by level, without the handshake of `attach`."""
    found = []
    for text in texts:
        model = _model(norm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with laconic.attach(text, model, optimizer) as session:
            plan = session.plan
            delay = plan.schedule.delay if isinstance(plan.schedule, laconic.Streaming) else 0
            first = plan.schedule.start + delay  # then as many fragments take effect in a cycle as are sent
            last = first + cycle_of(plan) - 1
            for step in range(1, last + 2):
                F.cross_entropy(model(torch.randn(4, 33)), torch.arange(4)).backward()
                optimizer.step()
                optimizer.zero_grad()
                assert session.step == step
            by_level: dict[str, int] = defaultdict(int)
            for entry in session.ledger.entries:
                if first <= entry.step <= last and entry.phase != "attach":
                    by_level[entry.level] += entry.wire_bytes
            found.append(dict(by_level))
    return found


def _check(texts: tuple[str, ...], workers: int, norm: bool = False) -> None:
    sent = run_workers(_sent, workers, (texts, norm), timeout_s=240)[0]
    network = ComputedNetwork(link("1gbit", workers))
    scenario = Scenario(Shapes.of(_model(norm)), workers, network, 0.1, bare=True)
    for text, by_level in zip(texts, sent, strict=True):
        prediction = Prediction(laconic.plan(text), scenario)
        planned = {level: round(count * prediction.cycle) for level, count in prediction.sent_bytes_by_level.items()}
        assert planned == by_level, text


@pytest.mark.parametrize(
    "schedule",
    [
        SCHEDULES[4],
        *(pytest.param(each, marks=pytest.mark.slow) for each in (*SCHEDULES[:4], SCHEDULES[5])),
    ],
)
def test_planned_bytes_are_those_of_the_ledger(schedule):
    _check(tuple(f"Plan(schedule={schedule}, codec={codec})" for codec in CODECS), 2)


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_planned_bytes_of_more_workers(schedule, workers):
    _check(tuple(f"Plan(schedule={schedule}, codec={codec})" for codec in CODECS), workers)


@pytest.mark.slow
def test_planned_bytes_of_named_plans():
    _check(METHODS, 4)


def test_buffers_are_sent_with_each_round_of_weights():
    texts = ("post_local_sgd(period=2)", "diloco(period=2, buffers='leader')", "diloco(period=2, buffers='keep')")
    _check((*texts, "frugal('30x')", "streaming_diloco(4, 2, 1)"), 4, norm=True)
