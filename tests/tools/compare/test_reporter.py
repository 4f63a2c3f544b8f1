"""The reporter of a training under `laconic compare`: plan in, progress out, validations, and a common end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
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
    Validator,
    control_group,
    from_env,
    mean_over,
    mean_weights,
)
from laconic.tools.compare.runs import (
    ABOUT,
    FOLDER,
    REPORTER,
    SECONDS,
    Goal,
    has_ended,
    read_reports,
    validation_points,
    write_goal,
)
from laconic.tools.errors import UsageError
from laconic.tools.launch.links import link
from laconic.tools.launch.output import worker_file
from tests.session.models import weights
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


PLANS = [
    "Plan(Every(8))",
    "streaming_diloco(period=4, fragments=2, lr=0.7, momentum=0.9, codec=Exact())",
    "ddp()",
    "alone()",
]
WATCHED = [
    "Plan(Every(4), ErrorFeedback(Cast('bf16')))",
    "streaming_diloco(period=3, fragments=1, lr=0.5, momentum=0.5, codec=Exact())",
    "alone()",
]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int) -> None:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + worker))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _everything(model: nn.Module) -> Tensor:
    return torch.cat([weights(model), *(b.reshape(-1).float() for b in model.buffers())])


def _averaged(worker: int) -> dict[str, tuple[Tensor, Tensor, Tensor, int]]:
    return {text: _averaged_under(text, worker) for text in PLANS}


def _averaged_under(text: str, worker: int) -> tuple[Tensor, Tensor, Tensor, int]:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = laconic.attach(laconic.plan(text), model, optimizer)
    for step in range(3):
        _step(model, optimizer, worker, step)
    own, sent = _everything(model), session.ledger.wire_bytes
    with mean_weights(session, control_group(dist.group.WORLD)):
        inside = _everything(model)
    return own, inside, _everything(model), session.ledger.wire_bytes - sent


def test_the_mean_of_all_weights_and_then_each_workers_own() -> None:
    by_worker = run_workers(_averaged, 3)
    for text in PLANS:
        results = [found[text] for found in by_worker]
        mean = torch.stack([own for own, _, _, _ in results]).double().mean(0).float()
        for own, inside, after, sent in results:
            assert torch.equal(own, after)
            assert sent == 0
            if text in ("ddp()", "alone()"):
                assert torch.equal(inside, own)
            else:  # without num_batches_tracked, the last buffer, which is no floating-point number
                assert torch.allclose(inside[:-1], mean[:-1], atol=1e-6)
                assert not torch.equal(inside, own)


def _trained(worker: int, folder: str) -> list[tuple[Tensor, Tensor]]:
    """The end of each training without a reporter, and with one."""
    folders = [Path(folder, str(index)) for index in range(len(WATCHED))]
    return [
        (_validated(worker, None, text), _validated(worker, where, text))
        for text, where in zip(WATCHED, folders, strict=True)
    ]


def _validated(worker: int, folder: Path | None, text: str) -> Tensor:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = laconic.attach(laconic.plan(text), model, optimizer)
    if folder is not None:
        session.observe(CompareReporter(folder))

    def validation() -> float:
        model.eval()
        with torch.no_grad():
            loss = float(model(torch.ones(1, 8)).square())
        model.train()
        return loss + worker

    with session:
        for step in range(6):
            _step(model, optimizer, worker, step)
            session.report(loss=0.5, validation=validation)
    return _everything(model)


@pytest.mark.slow
def test_training_does_not_notice(tmp_path: Path) -> None:
    for index in range(len(WATCHED)):
        (tmp_path / str(index)).mkdir()
        write_goal(tmp_path / str(index), Goal(steps=6, validate_every=3), computed=None)
    for found in run_workers(_trained, 2, (str(tmp_path),)):
        assert all(torch.equal(quiet, watched) for quiet, watched in found)
    for index, text in enumerate(WATCHED):
        reports = [read_reports(tmp_path / str(index), worker) for worker in range(2)]
        points = validation_points(reports[0])
        # not while a fragment is in flight, after step 3
        assert [point.step for point in points] == ([4, 6] if "streaming" in text else [3, 6])
        assert [each.validation for each in reports[0]] == [each.validation for each in reports[1]]
        assert all(point.loss > 0.5 for point in points)  # the mean over the workers


def test_the_clock_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 17.0, 30.0, 31.0])
    monkeypatch.setattr("laconic.tools.compare.reporter.time.perf_counter", lambda: next(now))
    model = _net()
    with laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        validate = Validator(every=1, control=None, replicas=None)
        assert [validate(session, lambda: 2.0, last=False) for _ in range(2)] == [2.0, 2.0]
    assert validate.paused_s == 8.0


def test_a_value_is_taken_as_it_is() -> None:
    model = _net()
    with laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        validate = Validator(every=5, control=None, replicas=None)
        assert validate(session, None, last=True) is None
        assert validate(session, torch.tensor(0.5), last=False) == 0.5
        assert [validate(session, lambda: 2.0, last=step == 7) for step in range(1, 8)] == [None] * 4 + [2.0, None, 2.0]
    assert mean_over(None, 1.0, 2.0) == (1.0, 2.0)
