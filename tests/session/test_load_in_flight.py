"""State that is loaded while a fragment is in flight stays as it was saved: the fragment ends in the other."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import laconic
from laconic.codecs import Codec
from laconic.exchange import Exchange, Mean
from tests.session.models import batch, mlp, weights
from tests.workers import run_workers

PLANS = ["frugal('30x', delay=1)", "streaming_diloco(period=4, fragments=2, delay=3, lr=0.7, momentum=0.9)"]
SAVED, LOADED = 10, 12
"""The steps after which state is saved and loaded. Both plans send a fragment in step `LOADED`."""


class Run:
    """A training with a fragment in flight after step `LOADED`."""

    def __init__(self, worker: int, text: str) -> None:
        self.worker = worker
        self.model = mlp()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.session = laconic.attach(laconic.plan(text), self.model, self.optimizer)

    def train(self, *steps: int) -> None:
        for step in steps:
            x, y = batch(self.worker, step)
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def saved(self) -> list[dict[str, Any]]:
        return [copy.deepcopy(each.state_dict()) for each in (self.model, self.optimizer, self.session)]

    def load(self, saved: list[dict[str, Any]]) -> None:
        model, optimizer, session = copy.deepcopy(saved)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.session.load_state_dict(session)


def _held(worker: int, text: str) -> tuple[bool, Tensor, Tensor]:
    """Hold the queue's thread before the fragment's exchange, load, and release it."""
    whole = Run(worker, text)
    whole.train(*range(1, 21))
    whole.session.detach()

    run, release, holds = Run(worker, text), threading.Event(), False

    def hold() -> Exchange[None]:
        assert release.wait(30)
        yield Mean(torch.zeros(1))

    def hold_first(codec: Codec) -> Codec:  # called right before the fragment is submitted
        if holds:
            run.session._levels.world.submit(hold(), "control", torch.empty(0))
        return codec

    run.session.wrap_codec(hold_first)
    run.train(*range(1, SAVED + 1))
    saved = run.saved()
    run.train(*range(SAVED + 1, LOADED))
    holds = True
    run.train(LOADED)
    assert run.session.in_flight
    holds = False
    run.load(saved)
    release.set()
    run.session.gather([0])  # behind the fragment in the queue
    same = equal(run.saved(), saved)
    run.train(*range(SAVED + 1, 21))
    run.session.detach()
    return same, weights(whole.model), weights(run.model)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize("text", PLANS)
def test_a_fragment_in_flight_does_not_touch_what_is_loaded(text):
    for same, whole, again in run_workers(_held, 2, (text,)):
        assert same
        assert torch.equal(whole, again)


def _loaded_at_once(worker: int, text: str, runs: int) -> list[int]:
    """Load right after a fragment was sent, while other threads compete with the queue's; return what went wrong."""
    ended, wrong = threading.Event(), []

    def compete() -> None:
        x = torch.ones(200, 200)
        while not ended.is_set():
            x @ x

    threads = [threading.Thread(target=compete) for _ in range(2)]
    for thread in threads:
        thread.start()
    run = Run(worker, text)
    run.train(*range(1, SAVED + 1))
    saved = run.saved()
    for number in range(runs):
        run.train(*range(SAVED + 1, LOADED + 1))
        assert run.session.in_flight
        run.load(saved)
        run.session.gather([0])
        if not equal(run.saved(), saved):
            wrong.append(number)
            run.load(saved)
    ended.set()
    for thread in threads:
        thread.join()
    run.session.detach()
    return wrong


@pytest.mark.nightly
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("text", PLANS)
def test_two_hundred_loads_under_load(text):
    assert run_workers(_loaded_at_once, 2, (text, 200), timeout_s=900) == [[], []]
