"""SIGTERM on one worker (F14): all stop after the same step, and what they save goes on from there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic import checkpoint
from tests.cluster.models import batch, mlp, weights
from tests.workers import run_workers


def _train(worker: int, text: str, wrapped: bool, folder: str | None, told: int | None) -> tuple[int, Tensor]:
    module = mlp()
    model: nn.Module = DDP(module) if wrapped else module
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    talk = laconic.attach(laconic.plan(text), model, optimizer)
    talk.stop_on(signal.SIGTERM)
    if folder is not None and checkpoint.generations(folder):
        saved: Any = checkpoint.load(folder).state
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        talk.load_state_dict(saved["talk"])
    for step in range(talk.step + 1, 31):
        if worker == 1 and step == told:
            os.kill(os.getpid(), signal.SIGTERM)
        x, y = batch(worker, step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if talk.should_stop:
            assert folder is not None
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "talk": talk.state_dict()}
            checkpoint.save(folder, state, step=talk.step)
            break
    return talk.step, weights(module)


@pytest.mark.parametrize(
    ("text", "stops", "wrapped"),
    [("ddp()", 10, True), ("power_sgd(rank=2)", 10, False), ("post_local_sgd(start=4, period=8)", 11, True)],
)
def test_all_stop_after_the_same_step_and_go_on_from_there(text, stops, wrapped, tmp_path: Path):
    stopped = run_workers(_train, 3, (text, wrapped, str(tmp_path), 10))
    assert [step for step, _ in stopped] == [stops] * 3
    resumed = run_workers(_train, 3, (text, wrapped, str(tmp_path), None))
    whole = run_workers(_train, 3, (text, wrapped, None, None))
    for (step, again), (_, straight) in zip(resumed, whole, strict=True):
        assert step == 30
        assert torch.equal(again, straight)
