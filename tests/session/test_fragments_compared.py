"""Fragments are compared by digest when they take effect: workers that hold different ones are named."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.session.models import batch, mlp
from tests.workers import run_workers

FLIP, NAME, ODD = 12, "4.weight", 2
PLANS = [
    "streaming_diloco(period=2, fragments=2, delay=0)",
    "streaming_diloco(period=2, fragments=2)",
    "streaming_diloco()",
    "streaming_diloco(period=4, fragments=2, delay=2, lr=0.7, momentum=0.9, mix=0.5, group=2)",
    "streaming_diloco(period=4, fragments=2, delay=0, mix=0.5, codec=Exact())",
    "streaming_diloco(period=4, fragments=2, group=2, codec=Exact(), start=3)",
]

OTHERS = [PLANS[0], *PLANS[4:]]


def _flipped(worker: int, text: str, wrapped: bool, every: int | None, flip: bool) -> tuple[str, list[int], int]:
    """Train; after step `FLIP`, a bit flips in what one worker keeps of a weight. Return the error, if there is one."""
    module = mlp()
    model = DDP(module) if wrapped else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with laconic.attach(laconic.plan(text), model, optimizer, verify_every=every) as session:
        for step in range(1, 41):
            x, y = batch(worker, step)
            F.cross_entropy(model(x), y).backward()
            try:
                optimizer.step()
            except laconic.DivergedError as error:
                return str(error), error.workers, session.step
            optimizer.zero_grad()
            if flip and step == FLIP and worker == ODD:
                anchor = session.state_dict()["anchor"][NAME]  # the tensor itself, not a copy
                anchor.view(torch.int32)[1, 2] ^= 1 << 9
    return "", [], session.step


@pytest.mark.parametrize("wrapped", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["bare", "ddp"])
@pytest.mark.parametrize("text", [*PLANS[1:4], *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def test_a_fragment_that_differs_is_named_when_it_takes_effect(text, wrapped):
    schedule = laconic.plan(text).schedule
    assert isinstance(schedule, laconic.Streaming)
    for error, workers, step in run_workers(_flipped, 4, (text, wrapped, None, True)):
        assert f"after step {step}, worker {ODD} holds other weights than the rest, first in {NAME}" in error
        assert workers == [ODD]
        assert FLIP < step <= FLIP + schedule.period + schedule.delay


@pytest.mark.parametrize("every", [0, 3, pytest.param(1, marks=pytest.mark.slow)])
def test_it_is_compared_as_often_as_verify_every_says(every):
    for error, workers, step in run_workers(_flipped, 4, (PLANS[1], False, every, True)):
        if every:
            assert workers == [ODD] and FLIP < step <= FLIP + 2 * every + 1, error  # a fragment at every step
        else:
            assert (error, step) == ("", 40)


@pytest.mark.slow
@pytest.mark.parametrize("text", PLANS)
def test_fragments_of_equal_workers_never_differ(text):
    assert run_workers(_flipped, 4, (text, False, 1, False)) == [("", [], 40)] * 4


def _digests(worker: int, text: str) -> list[int]:
    """Return the steps in which 16 bytes were sent beside headers: both ends of a digest."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with laconic.attach(laconic.plan(text), model, optimizer) as session:
        first = len(session.ledger.entries)
        for _ in range(12):
            model(torch.ones(1, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [e.step for e in list(session.ledger.entries)[first:] if e.phase == "control" and e.payload_bytes == 16]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("Plan(Streaming(period=4, fragments=2))", [2, 4, 6, 8, 10, 12]),
        ("Plan(Streaming(period=4, fragments=2, delay=1, start=3))", [5, 7, 9, 11]),
        ("Plan(Streaming(period=16, fragments=16))", [1, 2, 3, 4, 5, 6, 7]),  # the model has 8 tensors
    ],
)
def test_what_took_effect_is_compared_once(text, steps):
    assert run_workers(_digests, 2, (text,)) == [steps] * 2
