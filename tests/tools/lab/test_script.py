"""The lab's script: its learning rate, and one worker from start to end in this process."""

import math
from pathlib import Path

import pytest
import torch.distributed as dist

import laconic
from laconic.tools.compare.runs import (
    Goal,
    Outcome,
    TrainingRun,
    read_outcome,
    read_reports,
    report_variables,
    write_goal,
)
from laconic.tools.lab.script import lr_share, main
from laconic.tools.lab.tasks import Lab
from laconic.tools.launch.workers import variables

LAB = Lab(layers=1, width=16, context=16)
TINY = TrainingRun(laconic.ddp(), LAB, workers=1, goal=Goal(steps=6))


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(folder: Path) -> Outcome:
    folder.mkdir()
    write_goal(folder, TINY.goal, computed=None)
    with variables(report_variables(TINY, folder)):
        main(LAB.arguments(6))
    return read_outcome(TINY, folder)


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 1000])
def test_the_learning_rate_rises_then_falls_and_is_never_zero(steps):
    shares = [lr_share(step, steps) for step in range(1, steps + 1)]
    assert max(shares) == 1.0
    peak = shares.index(1.0)
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert min(shares) > 0


def test_a_world_of_one_trains_and_reports_each_step(alone, tmp_path):
    outcome = run(tmp_path / "run")
    reports = read_reports(tmp_path / "run", worker=0)
    assert [report.step for report in reports] == [0, 1, 2, 3, 4, 5, 6]
    assert reports[-1].wire_bytes == outcome.wire_bytes
    assert (outcome.model, outcome.loss_of) == ("gpt", "validation")
    assert math.isfinite(outcome.loss_final)
    assert outcome.loss_final < outcome.loss_start
    assert outcome.tokens_per_s == pytest.approx(6 * 4 * 16 / outcome.seconds)


def test_the_same_seed_gives_the_same_losses(alone, tmp_path):
    one, two = run(tmp_path / "one"), run(tmp_path / "two")
    assert (one.loss_start, one.loss_final) == (two.loss_start, two.loss_final)
    assert [point.loss for point in one.curve] == [point.loss for point in two.curve]


def test_it_is_an_ordinary_script(alone, monkeypatch):
    """Without `laconic compare`, it trains with ddp() and does not report."""
    monkeypatch.delenv("LACONIC_PLAN", raising=False)
    main(["--steps=2", "--layers=1", "--width=16", "--context=16"])
