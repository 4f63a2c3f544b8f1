"""Values are checked before any worker starts, and the errors tell what to do."""

import json
import math
from dataclasses import asdict, replace

import pytest

import laconic
from laconic.tools.compare.judging import as_json
from laconic.tools.compare.runs import (
    MOST_POINTS,
    REPORTS,
    Goal,
    Point,
    Report,
    Script,
    TrainingRun,
    curve,
    describe,
    read_reports,
    read_results,
    thinned,
    validation_points,
    waiting_share,
)
from laconic.tools.errors import UsageError
from laconic.tools.lab.script import parse
from laconic.tools.lab.tasks import Lab
from laconic.tools.launch.links import link
from laconic.tools.launch.output import worker_file
from laconic.tools.launch.workers import Place, WorkerNetwork, check_workers, found_place
from tests.tools.compare.outcomes import DDP, LOW_RANK


@pytest.mark.parametrize("name", ["layers", "width", "context", "batch"])
@pytest.mark.parametrize("value", [0, -3])
def test_counts_start_at_one(name, value):
    with pytest.raises(UsageError, match=rf"--{name} {value}: there must be at least 1. Use --{name} 1 or more."):
        Lab(**{name: value})


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_the_learning_rate_is_a_positive_number(value):
    with pytest.raises(UsageError, match=r"--lr .*: it must be a number above 0"):
        Lab(lr=value)


def test_seed_and_model():
    with pytest.raises(UsageError, match=r"--seed -1: a seed is between 0 and"):
        Lab(seed=-1)
    with pytest.raises(UsageError, match=r"--model bert: the lab has gpt and resnet"):
        Lab(model="bert")


def test_the_guard_is_one_of_three():
    with pytest.raises(UsageError, match=r"--guard on: it must be one of off, warn, act. Use --guard warn."):
        Lab(guard="on")  # type: ignore[arg-type]


def test_a_head_has_an_even_width():
    assert [Lab(width=width).heads for width in (16, 64, 128)] == [1, 2, 4]
    with pytest.raises(UsageError, match=r"--width 100: a GPT of this width has 3 heads, .* Use a multiple of 64"):
        Lab(width=100)
    Lab(model="resnet", width=7)  # a ResNet has no heads


def test_the_resnet_takes_no_text(tmp_path):
    with pytest.raises(UsageError, match=r"--model resnet --data .*: the ResNet trains on scikit-learn's digits"):
        Lab(model="resnet", data=tmp_path)


def test_too_many_workers():
    check_workers(workers=64, cores=16)
    check_workers(workers=16, cores=1)
    with pytest.raises(UsageError, match=r"--workers 17: this machine has 1 usable core, and more than 16"):
        check_workers(workers=17, cores=1)
    with pytest.raises(UsageError, match=r"Use --workers 32 or fewer, or laconic simulate"):
        check_workers(workers=33, cores=8)


def test_a_place_needs_all_of_its_variables():
    whole = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert found_place(whole) == Place(worker=1, workers=2)
    for name in whole:
        assert found_place({k: v for k, v in whole.items() if k != name}) is None


def test_scripts_and_goals_are_checked_too(tmp_path):
    script = tmp_path / "train.py"
    with pytest.raises(UsageError, match=r"--script .*train.py: there is no such file. Give the path of a training"):
        Script(script)
    with pytest.raises(UsageError, match="--workers 0: there must be at least 1"):
        TrainingRun(laconic.ddp(), workers=0)
    with pytest.raises(UsageError, match="--steps 0: there must be at least 1"):
        Goal(steps=0)
    with pytest.raises(UsageError, match="--validate-every 0: there must be at least 1"):
        Goal(validate_every=0)
    with pytest.raises(UsageError, match="--until-loss -1: it must be a number above 0"):
        Goal(until_loss=-1)


def test_the_lab_script_gets_all_settings_as_arguments(tmp_path):
    lab = Lab("gpt", 1, 16, 8, 3, 1 / 3, 5, tmp_path / "a b", 0.1, "warn")
    assert parse(lab.arguments(7)) == (lab, 7)


def test_what_a_run_depends_on_is_in_its_description(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    run, own = TrainingRun(laconic.ddp()), TrainingRun(laconic.ddp(), Script(script))
    slow = WorkerNetwork(computed=link("10mbit", workers=4))
    different = {
        describe(run, WorkerNetwork()),
        describe(run, slow),
        describe(replace(run, plan=laconic.alone()), WorkerNetwork()),
        describe(replace(run, training=Lab(seed=1)), WorkerNetwork()),
        describe(replace(run, training=Lab(data=tmp_path)), WorkerNetwork()),
        describe(replace(run, goal=Goal(300, until_loss=2.0)), WorkerNetwork()),
        describe(own, WorkerNetwork()),
        describe(replace(own, training=Script(script, ("3",))), WorkerNetwork()),
    }
    assert len(different) == 8


NOW = Report(worker=0, step=1, loss=2.0, seconds=1.0, wire_bytes=7)


def test_a_curve_is_the_mean_over_workers_and_the_last_eight_reports():
    first = [replace(NOW, step=step, loss=float(step), seconds=step / 2) for step in range(1, 11)]
    second = [replace(report, worker=1, loss=report.loss + 2) for report in first]
    points = curve([first, second[:-1]])  # the last line of the second worker is missing
    assert len(points) == 9
    assert points[0] == Point(step=1, seconds=0.5, loss=2.0, wire_bytes=7)
    assert points[8].loss == sum(range(2, 10)) / 8 + 1


def test_thinning_keeps_both_ends():
    points = [Point(step, step, 1.0, 0) for step in range(1, 100_001)]
    few = thinned(points)
    assert len(few) <= MOST_POINTS + 1
    assert (few[0], few[-1]) == (points[0], points[-1])
    assert thinned(points[:3]) == tuple(points[:3])
    assert thinned([]) == ()


def test_waiting():
    assert waiting_share([[], []]) == 0.0
    assert waiting_share([[1.0, 1.0], [1.0, 1.0]]) == 0.0
    assert waiting_share([[2.0, 1.0, 9.0], [1.0, 2.0]]) == 2 / 6  # what only one worker has does not count


def test_the_time_that_is_left():
    now = replace(NOW, seconds=2.0)
    assert now.seconds_left(Goal(steps=4)) == 6.0
    assert replace(now, step=4).seconds_left(Goal(steps=4)) == 0.0
    assert now.seconds_left(Goal()) is None
    assert now.seconds_left(Goal(steps=4, seconds=5.0)) == 3.0
    assert now.seconds_left(Goal(seconds=5.0)) == 3.0
    assert replace(now, ended="loss").seconds_left(Goal()) == 0.0


def test_the_last_report_of_a_step_counts_and_one_before_the_first_step_is_no_point(tmp_path):
    losses = {0: [4.0], 1: [3.0], 2: [2.0, 1.5]}
    reports = [replace(NOW, step=step, validation=loss) for step, given in losses.items() for loss in given]
    worker_file(tmp_path, 0, REPORTS).write_text("".join(json.dumps(asdict(report)) + "\n" for report in reports))
    found = read_reports(tmp_path, 0)
    assert [(report.step, report.validation) for report in found] == [(0, 4.0), (1, 3.0), (2, 1.5)]
    assert [point.step for point in curve([found])] == [point.step for point in validation_points(found)] == [1, 2]


def test_results_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "out.json"
    changed = replace(LOW_RANK, changed_to="ddp()", settings="a run")
    path.write_text(as_json([DDP, changed]))
    assert read_results(path) == [DDP, changed]
    path.write_text(as_json([replace(DDP, loss_final=math.nan)]))
    assert math.isnan(read_results(path)[0].loss_final)


@pytest.mark.parametrize("text", ["", "[{}]", "[1]", "{}x"])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "out.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"--json .*out.json: this is no file of results"):
        read_results(path)
