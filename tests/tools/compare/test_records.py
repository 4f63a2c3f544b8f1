"""The outcome that the files of a run give, and a file of results."""

import json
import math
from dataclasses import asdict, replace

import pytest

from laconic.tools.compare.judging import as_json
from laconic.tools.compare.runs import (
    MOST_POINTS,
    REPORTS,
    Goal,
    Point,
    Report,
    curve,
    read_reports,
    read_results,
    thinned,
    validation_points,
    waiting_share,
)
from laconic.tools.errors import UsageError
from laconic.tools.launch.output import worker_file
from tests.tools.compare.outcomes import DDP, LOW_RANK

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
