"""The outcome of a run, read from the files that its workers wrote."""

import array
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import laconic
from laconic.tools.compare.progress import Ending, Progress, read_progress
from laconic.tools.compare.reporter import ABOUT, SMOOTHED, seconds_file
from laconic.tools.compare.settings import Run, label
from laconic.tools.errors import UsageError

MOST_POINTS = 400


@dataclass(frozen=True)
class Point:
    """One point of a run's curve: the loss at a step, and the seconds and bytes of one worker so far."""

    step: int
    seconds: float
    loss: float
    wire_bytes: int


@dataclass(frozen=True)
class Outcome:
    """The results of a run.

    Bytes are per worker, tokens are of all workers (an image counts as one token), and seconds are of training alone,
    without start-up and evaluation.
    `sent_bytes` and `wire_bytes` are what a worker sends,
    `network_bytes` the same with the headers of gloo and TCP, and `interface_bytes` the count of the worker's network
    interface in the same time, if it has its own.
    `talking_seconds` is the time during which a collective was in flight, with or without computation;
    `waiting_seconds` is the part of it spent waiting for slower workers. `loss_of` tells which loss is reported, and is
    compared with `until_loss`: the validation loss, of which `validations` has every value, or the training loss, of
    which `curve` has the smoothed values.
    With `clock` "computed", the seconds of the link are computed from the bytes; all others are measured.
    """

    plan: str
    model: str
    parameters: int
    workers: int
    steps: int
    seconds: float
    talking_seconds: float
    tokens_per_s: float
    sent_bytes: int
    wire_bytes: int
    loss_start: float
    loss_final: float
    loss_of: str = "validation"
    ended: Ending = "steps"
    until_loss: float | None = None
    link: str | None = None
    clock: str = "measured"
    waiting_seconds: float | None = None
    network_bytes: int = 0
    interface_bytes: int | None = None
    level_bytes: dict[str, int] = field(default_factory=dict)
    uplink_bytes: dict[str, int] = field(default_factory=dict)
    wire_bytes_by_worker: tuple[int, ...] = ()
    interface_bytes_by_worker: tuple[int, ...] = ()
    curve: tuple[Point, ...] = ()
    validations: tuple[Point, ...] = ()
    without_link: bool = False
    changed_to: str | None = None
    """The plan at the end, if the run has changed it."""
    residual: float | None = None
    """What a guard measured last: how many mean gradients, or deltas, lag behind."""
    agreement: float | None = None
    """What a guard measured last: how much the workers' gradients, or deltas, have in common."""

    @property
    def label(self) -> str:
        """The plan, what the run changed it to, and whether it ran without the slow link of the others."""
        plan = self.plan if self.changed_to is None else f"{self.plan} -> {self.changed_to}"
        return label(plan, self.without_link)

    @property
    def reached(self) -> bool:
        """Whether the run ended at its target loss."""
        return self.ended == "loss"


def read_outcome(run: Run, folder: Path, only_worker: int | None = None) -> Outcome:
    """Read the outcome of a run from its folder. With `only_worker`, the folder has the files of that worker alone."""
    workers = range(run.workers) if only_worker is None else [only_worker]
    reports = [read_progress(folder, worker) for worker in workers]
    about = _about(run, folder, reports)
    points, lasts = curve(reports), [of_one[-1] for of_one in reports]
    first = lasts[0]
    validations = validation_points(reports[0])
    losses: dict[str, Any] = {"loss_of": "validation" if validations else "training"}
    losses |= {"loss_start": (validations or points)[0].loss, "loss_final": (validations or points)[-1].loss}
    return Outcome(
        plan=str(laconic.plan(run.plan)),
        parameters=int(about["parameters"]),
        changed_to=about.get("changed_to"),
        residual=first.residual,
        agreement=first.agreement,
        workers=run.workers,
        steps=first.step,
        seconds=first.seconds,
        talking_seconds=fmean(last.communication_s for last in lasts),
        tokens_per_s=fmean(last.tokens_per_s for last in lasts) * run.workers,
        sent_bytes=first.sent_bytes,
        wire_bytes=first.wire_bytes,
        network_bytes=first.wire_bytes + first.framing_bytes,
        ended=first.ended or "steps",
        until_loss=run.until_loss,
        without_link=run.without_link,
        level_bytes=first.level_bytes,
        curve=thinned(points),
        validations=thinned(validations),
        **(losses | run.results(folder)),
        **(_by_worker(folder, lasts) if only_worker is None else {}),
    )


def _about(run: Run, folder: Path, reports: Sequence[Sequence[Progress]]) -> dict[str, Any]:
    """What worker 0 wrote about the run. Refuses a script that did not report, or ran another plan."""
    if not all(reports):
        raise UsageError(
            f"{run.title}: it ended without a report from every worker. Call session.report(loss=...) after each step "
            "on every worker, where session = laconic.attach(laconic.plan_from_env(), model, optimizer)."
        )
    about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
    if about["plan"] != repr(laconic.plan(run.plan)):
        raise UsageError(
            f"{run.title}: it was started with plan {laconic.plan(run.plan)} and ran {about['plan']}. "
            "Attach laconic.plan_from_env()."
        )
    return about


def _by_worker(folder: Path, lasts: Sequence[Progress]) -> dict[str, Any]:
    """The fields of an outcome that need the files of all workers."""
    counted = [last.interface_bytes for last in lasts if last.interface_bytes is not None]
    busy_s = fmean(last.communication_s - last.link_s for last in lasts)
    return {
        "waiting_seconds": waiting_share([_seconds(folder, last.worker) for last in lasts]) * busy_s,
        "wire_bytes_by_worker": tuple(last.wire_bytes for last in lasts),
        "interface_bytes_by_worker": tuple(counted),
        "interface_bytes": round(fmean(counted)) if counted else None,
    }


def _seconds(folder: Path, worker: int) -> "array.array[float]":
    content = seconds_file(folder, worker).read_bytes()
    return array.array("d", content[: len(content) // 8 * 8])


def curve(reports: Sequence[Sequence[Progress]]) -> list[Point]:
    """The loss at each report: the mean over the last reports and all workers. Seconds and bytes are worker 0's."""
    recent: deque[float] = deque(maxlen=SMOOTHED)
    points = []
    for of_all in zip(*reports, strict=False):
        recent.append(fmean(progress.loss for progress in of_all))
        first = of_all[0]
        points.append(Point(first.step, round(first.seconds, 4), round(fmean(recent), 5), first.wire_bytes))
    return points


def validation_points(reports: Sequence[Progress]) -> list[Point]:
    """The validation loss at each report that has one, with the seconds and bytes of that worker."""
    found = [(each, each.validation) for each in reports if each.validation is not None]
    return [Point(each.step, round(each.seconds, 4), round(loss, 5), each.wire_bytes) for each, loss in found]


def thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """At most about 400 of the points, with the first and the last."""
    stride = -(-len(points) // MOST_POINTS) or 1
    return tuple(points[:-1:stride]) + tuple(points[-1:])


def waiting_share(seconds: Sequence[Sequence[float]]) -> float:
    """The share of the time in collectives that workers spent waiting for the last worker to join.

    The last worker measures the true duration of a collective; the rest of another worker's duration is its wait.

    >>> waiting_share([[3.0, 1.0], [1.0, 1.0]])  # the first worker waited 2 of its 4 seconds, the other did not wait
    0.3333333333333333
    """
    of_all = list(zip(*seconds, strict=False))
    spent = sum(sum(each) for each in of_all)
    return sum(sum(each) - len(each) * min(each) for each in of_all) / spent if spent else 0.0
