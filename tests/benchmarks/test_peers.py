"""benchmarks/peers.py: its loop is the lab's training, and a contestant that fails is a row with its message."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from laconic.plans.methods import ddp
from laconic.tools.compare.runs import Goal, TrainingRun, launch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEPS = 10


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("peers")


@pytest.mark.slow
def test_the_loop_is_the_training_of_the_lab(peers, tmp_path):
    (tmp_path / "lab").mkdir()
    lab = launch(TrainingRun(ddp(), workers=2, goal=Goal(STEPS)), tmp_path / "lab")
    peers.launch(peers.Goal("torch DDP", 0, STEPS, seconds=60.0, until_loss=1.0), tmp_path, None, workers=2)
    points = peers.read_points(tmp_path)
    assert [(p.step, round(p.loss, 5)) for p in points] == [(p.step, p.loss) for p in lab.validations]
    assert [p.ended for p in points] == ["", "steps"]


def test_a_contestant_that_is_not_installed_is_a_row_with_its_message(peers):
    missing = replace(peers.named("torch DDP"), needs="no_such_package")
    run = peers.run_one(missing, peers.Goal("torch DDP", 0, 300, 60.0, 2.0), "10mbit", hosts=4)
    assert "| torch DDP | not installed: no_such_package |" in peers.tables.page([run], 2.0)
