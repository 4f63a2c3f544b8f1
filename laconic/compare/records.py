"""What a run's files come to: its curve, who waited for whom, what each worker's network card counted.

Read by the process that started the workers, in the same way for the lab's training and for a user's script.
"""

import array
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from laconic.compare.lab.training import Outcome, Point
from laconic.compare.progress import Tail
from laconic.compare.reporter import progress_file, seconds_file
from laconic.compare.reporting import SMOOTHED, Progress

MOST_POINTS = 400


def with_record(outcome: Outcome, folder: Path) -> Outcome:
    """The outcome, with what the files in `folder` say."""
    told = [Tail(progress_file(folder, worker)).news() for worker in range(outcome.workers)]
    lasts = [lines[-1] for lines in told]
    cards = [last.card_bytes for last in lasts if last.card_bytes is not None]
    return replace(
        outcome,
        curve=thinned(curve(told)),
        talking_seconds=fmean(last.talking_s for last in lasts),
        waiting_seconds=waiting_share(seconds_of(folder, outcome.workers)) * fmean(_busy_s(last) for last in lasts),
        wire_bytes_by_worker=tuple(last.wire_bytes for last in lasts),
        interface_bytes_by_worker=tuple(cards),
        interface_bytes=round(fmean(cards)) if cards else None,
    )


def curve(told: Sequence[Sequence[Progress]]) -> list[Point]:
    """The loss that runs are judged by, at each step: averaged over the last reports and over the workers.

    Seconds and bytes are worker 0's.
    """
    recent: deque[float] = deque(maxlen=SMOOTHED)
    points = []
    for together in zip(*told, strict=False):
        recent.append(fmean(progress.loss for progress in together))
        first = together[0]
        points.append(Point(first.step, round(first.seconds, 4), round(fmean(recent), 5), first.wire_bytes))
    return points


def thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """At most some four hundred of the points, the first and the last among them."""
    stride = -(-len(points) // MOST_POINTS) or 1
    return tuple(points[:-1:stride]) + tuple(points[-1:])


def waiting_share(seconds: Sequence[Sequence[float]]) -> float:
    """The share of the time in collectives that went into waiting for the last worker to come.

    Who comes last sees a collective's true length; what it takes longer for another is that one's wait.

    >>> waiting_share([[3.0, 1.0], [1.0, 1.0]])  # the first worker waited 2 of its 4 seconds, the other not at all
    0.3333333333333333
    """
    together = list(zip(*seconds, strict=False))
    spent = sum(sum(each) for each in together)
    return sum(sum(each) - len(each) * min(each) for each in together) / spent if spent else 0.0


def seconds_of(folder: Path, workers: int) -> list["array.array[float]"]:
    """The seconds of each collective, for each worker."""
    found = []
    for worker in range(workers):
        content = seconds_file(folder, worker).read_bytes()
        found.append(array.array("d", content[: len(content) // 8 * 8]))
    return found


def _busy_s(last: Progress) -> float:
    return last.talking_s - last.link_s
