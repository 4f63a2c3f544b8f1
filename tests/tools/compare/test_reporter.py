"""The reporter of a training under `laconic compare`: plan in, progress out, and a common end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic
from laconic.ledger import Ledger
from laconic.session.observers import VARIABLE
from laconic.tools.compare.reporter import (
    CHECKED_EVERY,
    CompareReporter,
    StopCheck,
    TimedLedger,
    control_group,
    from_env,
)
from laconic.tools.compare.runs import ABOUT, FOLDER, REPORTER, SECONDS, Goal, has_ended, read_reports, write_goal
from laconic.tools.errors import UsageError
from laconic.tools.launch.links import link
from laconic.tools.launch.output import worker_file
from tests.workers import run_workers


def endings(goal: Goal, losses: list[float], seconds: float = 0.0) -> list[str]:
    check = StopCheck(goal, control=None)
    return [check(step, loss, seconds) for step, loss in enumerate(losses, start=1)]


def test_steps_end_a_run():
    assert endings(Goal(steps=3), [1.0] * 3) == ["", "", "steps"]


def test_a_loss_ends_a_run_at_a_check_once_its_mean_is_reached():
    found = endings(Goal(steps=100, until_loss=1.0), [3.0] * 8 + [0.5] * 8)
    assert found.index("loss") + 1 == 16  # at step 12 the mean of the last eight is still 1.75
    assert 16 % CHECKED_EVERY == 0


def test_seconds_end_a_run_at_a_check():
    assert endings(Goal(seconds=1.0), [1.0] * 4, seconds=2.0) == ["", "", "", "seconds"]


def test_the_last_step_may_reach_the_loss():
    assert endings(Goal(steps=1, until_loss=2.0), [1.5]) == ["loss"]


def test_nan_does_not_reach_a_loss():
    assert endings(Goal(steps=1, until_loss=2.0), [float("nan")]) == ["steps"]


def test_a_validation_loss_decides_where_there_is_one():
    check = StopCheck(Goal(steps=100, until_loss=1.0), control=None)
    check.validates = True
    assert [check(step, 0.1, 0.0, None) for step in range(1, 9)] == [""] * 8  # the training loss is low
    assert check(9, 0.1, 0.0, 1.1) == ""
    assert check(10, 9.0, 0.0, float("nan")) == ""
    assert check(11, 9.0, 0.0, 1.0) == "loss"


def stop_together(worker: int) -> int:
    check = StopCheck(Goal(steps=100, until_loss=1.5), control_group(dist.group.WORLD))
    return next(step for step in range(1, 101) if check(step, 1.0 if worker == 0 else 1.0 + 10 / step, 0.0))


def test_workers_stop_at_the_same_step():
    ends = set(run_workers(stop_together, workers=3))
    assert len(ends) == 1
    [end] = ends
    assert end % CHECKED_EVERY == 0
    assert end > CHECKED_EVERY


def test_the_time_of_collectives_in_flight_together_counts_once():
    ledger = Ledger()
    times = TimedLedger(ledger)
    for _ in range(2):
        ledger.record("all_reduce", 100, 2, phase="gradient", seconds=100.0)
    assert ledger.seconds == pytest.approx(200.0)
    assert 100.0 <= times.busy_s < 150.0


def test_a_ledger_may_be_used_after_its_times_are_closed(tmp_path):
    ledger = Ledger()
    ledger.record("all_reduce", 100, 2, phase="gradient", seconds=1.0)  # before: counted, too
    times = TimedLedger(ledger, seconds=(tmp_path / "seconds").open("wb", buffering=0))
    ledger.record("all_reduce", 100, 2, phase="gradient", level="site", seconds=1.0)  # not among all workers
    times.close()
    ledger.record("all_reduce", 100, 2, phase="gradient", seconds=1.0)
    assert (tmp_path / "seconds").stat().st_size == 8


def train(steps: int, guard: laconic.Guard | None = None) -> int:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.plan_from_env(), model, optimizer, observers=[guard] if guard else []) as session:
        for step in range(1, steps + 1):
            loss = F.mse_loss(model(torch.ones(4, 8)), torch.zeros(4, 8))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.report(loss=loss, tokens=4):
                return step
    return 0


def test_without_a_folder_there_is_no_reporter(monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setenv(VARIABLE, REPORTER)
    assert from_env() is None
    assert train(3) == 0


def test_the_plan_from_the_environment(monkeypatch):
    monkeypatch.delenv("LACONIC_PLAN", raising=False)
    assert laconic.plan_from_env() == laconic.ddp()
    assert laconic.plan_from_env(default=laconic.power_sgd(rank=2)) == laconic.power_sgd(rank=2)
    monkeypatch.setenv("LACONIC_PLAN", "post_local_sgd(period=8)")
    assert laconic.plan_from_env(default=laconic.ddp()) == laconic.post_local_sgd(period=8)


def test_a_computed_link_moves_the_clock(tmp_path):
    write_goal(tmp_path, Goal(seconds=1e6), computed=link("8kbit", workers=2))
    model = nn.Linear(2, 2)
    with laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        session.observe(CompareReporter(tmp_path))
        session.ledger.record("all_reduce", 1_000_000, 2, phase="gradient")
        assert not session.report(loss=torch.tensor(1.0), tokens=8)
        assert not has_ended(tmp_path, worker=0)
        [report] = read_reports(tmp_path, worker=0)
    assert 1000.0 <= report.seconds < 1100.0
    assert (report.wire_bytes, report.level_bytes) == (1_000_000, {"world": 1_000_000})
    assert report.link_seconds == pytest.approx(1000.0)
    assert report.communication_seconds == pytest.approx(1000.0)
    assert report.framing_bytes > 0


def reported_training(worker: int, folder: str) -> int:
    os.environ.update({FOLDER: folder, VARIABLE: REPORTER, "LACONIC_PLAN": "post_local_sgd(period=2)"})
    return train(50)


def test_each_worker_reports_its_steps_and_stops_at_the_goal(tmp_path: Path):
    write_goal(tmp_path, Goal(steps=6), computed=link("8mbit", workers=2))
    assert run_workers(reported_training, workers=2, args=(str(tmp_path),)) == [6, 6]
    assert json.loads((tmp_path / ABOUT).read_text()) == {"plan": "post_local_sgd(period=2)", "parameters": 72}
    for worker in (0, 1):
        assert has_ended(tmp_path, worker)
        reports = read_reports(tmp_path, worker)
        assert [progress.step for progress in reports] == [1, 2, 3, 4, 5, 6]
        assert [progress.worker for progress in reports] == [worker] * 6
        assert reports[-1].ended == "steps"
        assert 0 < reports[-1].wire_bytes - 3 * 72 * 4 < 300  # and what workers check about each other
        assert reports[-1].link_seconds > 0
        doubles = worker_file(tmp_path, worker, SECONDS).stat().st_size / 8  # one for each collective
        assert doubles == 3 + 3 + 3 * 2  # rounds; at attach; a header before and a digest after each round


def resumed_training(worker: int, folder: str) -> str:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach("post_local_sgd(period=2)", model, optimizer) as session:
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        saved = session.state_dict()
    os.environ.update({FOLDER: folder, VARIABLE: REPORTER, "LACONIC_PLAN": "post_local_sgd(period=2)"})
    with laconic.attach(laconic.plan_from_env(), model, optimizer) as session:
        try:
            session.load_state_dict(saved)
        except UsageError as error:
            return str(error)
    return ""


def test_a_script_that_resumes_is_told_so(tmp_path: Path):
    write_goal(tmp_path, Goal(steps=3), computed=None)
    for said in run_workers(resumed_training, workers=2, args=(str(tmp_path),)):
        assert said.startswith("the script goes on from a checkpoint of step 3: its losses")
        assert said.endswith("remove the checkpoint, or let the script resume only where LACONIC_REPORT is not set.")


def guarded_training(worker: int, folder: str) -> int:
    os.environ.update({FOLDER: folder, VARIABLE: REPORTER, "LACONIC_PLAN": "power_sgd(rank=1, bits=None)"})
    return train(50, laconic.Guard("warn", every=2))


def test_what_a_guard_measures_is_in_the_progress(tmp_path: Path):
    write_goal(tmp_path, Goal(steps=4), computed=None)
    run_workers(guarded_training, workers=2, args=(str(tmp_path),))
    first, other = (read_reports(tmp_path, worker) for worker in (0, 1))
    assert [each.residual is None for each in first] == [True, False, False, False]
    assert [(each.residual, each.agreement) for each in first] == [(each.residual, each.agreement) for each in other]
    assert first[-1].agreement == pytest.approx(1.0)  # all workers have the same data


def sharded_training(worker: int, folder: str) -> tuple[int, int]:
    os.environ.update({FOLDER: folder, VARIABLE: REPORTER})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.plan_from_env(), model, optimizer) as session:
        for step in range(1, 21):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            if session.report(loss=float(worker)):  # the mean over all is 1.5; over the session's group 1 or 2
                return step, session.workers
    return 0, 0


def test_all_workers_of_a_sharded_model_stop_together(tmp_path):
    write_goal(tmp_path, Goal(steps=8, until_loss=1.0), computed=None)
    assert run_workers(sharded_training, workers=4, args=(str(tmp_path),)) == [(8, 2)] * 4
    lasts = [read_reports(tmp_path, worker)[-1] for worker in range(4)]
    assert {last.ended for last in lasts} == {"steps"}
    assert json.loads((tmp_path / ABOUT).read_text())["parameters"] == 72


def test_reports_before_the_first_step_and_after_the_end_have_validation_losses_only(tmp_path):
    write_goal(tmp_path, Goal(steps=2, validate_every=1), computed=None)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.ddp(), model, optimizer) as session:
        session.observe(CompareReporter(tmp_path))
        assert not session.report(loss=9.0, validation=5.0)
        for step in (1, 2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            assert session.report(loss=1.0, tokens=4, validation=lambda: 3.0) == (step == 2)
        assert session.report(loss=1.0, validation=lambda: 2.5)
    reports = read_reports(tmp_path, worker=0)
    assert [(report.step, report.validation) for report in reports] == [(0, 5.0), (1, 3.0), (2, 2.5)]
    assert (reports[-1].ended, reports[-1].tokens) == ("steps", 8)
