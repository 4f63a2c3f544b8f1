"""The outcome that the files of a run give."""

from dataclasses import replace

from laconic.tools.compare.progress import Progress
from laconic.tools.compare.records import MOST_POINTS, Point, curve, thinned, waiting_share

NOW = Progress(worker=0, step=1, steps=4, loss=2.0, tokens_per_s=10.0, sent_bytes=5, seconds=1.0, wire_bytes=7)


def test_a_curve_is_the_mean_over_workers_and_the_last_eight_reports():
    first = [replace(NOW, step=step, loss=float(step), seconds=step / 2) for step in range(1, 11)]
    second = [replace(progress, worker=1, loss=progress.loss + 2) for progress in first]
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
