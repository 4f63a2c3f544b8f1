"""SIGTERM on one worker (F14): all stop after the same step, and what they save goes on from there."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic import checkpoint
from laconic.session.step_headers import MOST_STEPS, Stop
from tests.session.models import batch, mlp, weights
from tests.workers import run_workers


def _train(worker: int, text: str, wrapped: bool, folder: str | None, told: int | None) -> tuple[int, Tensor]:
    module = mlp()
    model: nn.Module = DDP(module) if wrapped else module
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = laconic.attach(laconic.plan(text), model, optimizer)
    session.stop_on(signal.SIGTERM, every_s=0)
    if folder is not None and checkpoint.checkpoints(folder):
        saved: Any = checkpoint.load(folder).state
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        session.load_state_dict(saved["session"])
    for step in range(session.step + 1, 31):
        if worker == 1 and step == told:
            os.kill(os.getpid(), signal.SIGTERM)
        x, y = batch(worker, step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if session.should_stop:
            assert folder is not None
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "session": session.state_dict()}
            checkpoint.save(folder, state, step=session.step)
            break
    return session.step, weights(module)


@pytest.mark.parametrize(
    ("text", "stops", "wrapped"),
    [
        ("ddp()", 10, True),
        pytest.param("power_sgd(rank=2)", 10, False, marks=pytest.mark.slow),
        pytest.param("post_local_sgd(start=4, period=8)", 11, True, marks=pytest.mark.slow),
    ],
)
def test_all_stop_after_the_same_step_and_go_on_from_there(text, stops, wrapped, tmp_path: Path):
    stopped = run_workers(_train, 3, (text, wrapped, str(tmp_path), 10))
    assert [step for step, _ in stopped] == [stops] * 3
    resumed = run_workers(_train, 3, (text, wrapped, str(tmp_path), None))
    whole = run_workers(_train, 3, (text, wrapped, None, None))
    for (step, again), (_, straight) in zip(resumed, whole, strict=True):
        assert step == 30
        assert torch.equal(again, straight)


def _seldom(worker: int) -> tuple[int, int]:
    module = mlp()
    model = DDP(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = laconic.attach(laconic.ddp(), model, optimizer)
    session.stop_on(signal.SIGTERM)
    while not session.should_stop and session.step < 500:
        if worker == 1 and session.step == 200:
            os.kill(os.getpid(), signal.SIGTERM)
        x, y = batch(worker, session.step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    asked = session.ledger.totals(by="phase")["control"]
    return session.step, asked.collectives


def test_workers_that_average_gradients_ask_each_other_twice_a_second_and_stop_together():
    (step, asked), *others = run_workers(_seldom, 3)
    assert others == [(step, asked)] * 2
    assert 200 < step <= 201 + MOST_STEPS
    assert asked < step / 2, "steps of a few milliseconds"


def test_signals_are_for_the_main_thread():
    with ThreadPoolExecutor(1) as threads, pytest.raises(RuntimeError, match=r"stop_on\(SIGTERM\) in thread .* there"):
        threads.submit(Stop().on, [signal.SIGTERM], 0.5).result()


def test_the_pace_of_the_slowest_says_when_to_ask_again(monkeypatch):
    clock = 0.0
    monkeypatch.setattr("laconic.session.step_headers.monotonic", lambda: clock)
    stop = Stop(watched=True)
    assert stop.is_due(1) and stop.step_ms(1) == 0
    stop.exchanged(1, 0)
    assert stop.is_due(2)
    clock = 0.1
    assert stop.step_ms(2) == 100
    stop.exchanged(2, 120)
    assert [step for step in range(3, 8) if stop.is_due(step)] == [6, 7]  # 4 of 120 ms
    stop.exchanged(6, 2000)
    assert stop.is_due(7)
    stop.exchanged(7, 1)
    assert not stop.is_due(6 + MOST_STEPS) and stop.is_due(7 + MOST_STEPS)
    stop.restart()
    assert stop.is_due(1) and not Stop().is_due(1)
