"""The channel of a script under `laconic compare`: plan in, losses out; and silence where nobody listens."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import laconic
from laconic.compare.reporter import FOLDER, about_file, goal_file, progress_file, seconds_file
from laconic.compare.reporting import Goal, Progress
from tests.workers import run_workers


def train(steps: int) -> int:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.plan_from_env(), model, optimizer) as session:
        for step in range(1, steps + 1):
            loss = F.mse_loss(model(torch.ones(4, 8)), torch.zeros(4, 8))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.report(loss=loss, tokens=4):
                return step
    return 0


def test_nobody_listens(monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    assert train(3) == 0


def test_the_plan_from_the_environment(monkeypatch):
    monkeypatch.delenv("LACONIC_PLAN", raising=False)
    assert laconic.plan_from_env() == laconic.ddp()
    assert laconic.plan_from_env(default=laconic.power_sgd(rank=2)) == laconic.power_sgd(rank=2)
    monkeypatch.setenv("LACONIC_PLAN", "post_local_sgd(period=8)")
    assert laconic.plan_from_env(default=laconic.ddp()) == laconic.post_local_sgd(period=8)


def train_listened_to(worker: int, folder: str) -> int:
    import os

    os.environ.update({FOLDER: folder, "LACONIC_PLAN": "post_local_sgd(period=2)"})
    return train(50)


def test_each_worker_tells_its_steps_and_stops_when_it_is_enough(tmp_path: Path):
    goal_file(tmp_path).write_text(json.dumps(asdict(Goal(steps=6)) | {"computed": "8mbit"}))
    assert run_workers(train_listened_to, workers=2, args=(str(tmp_path),)) == [6, 6]
    assert json.loads(about_file(tmp_path).read_text()) == {"plan": "post_local_sgd(period=2)", "parameters": 72}
    for worker in (0, 1):
        told = [Progress(**json.loads(line)) for line in progress_file(tmp_path, worker).read_text().splitlines()]
        assert [progress.step for progress in told] == [1, 2, 3, 4, 5, 6]
        assert [progress.worker for progress in told] == [worker] * 6
        assert told[-1].ended == "steps"
        assert 0 < told[-1].sent_bytes - 3 * 72 * 4 < 200  # and what workers check about each other
        assert told[-1].link_s > 0
        doubles = seconds_file(tmp_path, worker).stat().st_size / 8  # one for each collective
        assert doubles == 3 + 2 + 3 * 2  # rounds; at attach; a header before and a digest after each round
