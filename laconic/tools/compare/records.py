"""What a run has measured: the reports of its workers, in the files that they write, and the outcome read from them."""

from __future__ import annotations

import array
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import laconic
from laconic.plans.plan import Plan
from laconic.tools.compare.runs import Goal, TrainingRun, label
from laconic.tools.errors import UsageError
from laconic.tools.launch.tail import Tail

MOST_POINTS = 400
SMOOTHED = 8  # reports in the mean training loss

Ending = Literal["", "steps", "seconds", "loss"]


@dataclass(frozen=True)
class Report:
    """The state of one worker after a step. All numbers are this worker's, from the beginning of the run.

    `seconds` includes `link_seconds`, the computed time of the link; `communication_seconds` is the part of it during
    which a collective was in flight, with or without computation. `level_bytes` are the `wire_bytes` of each level.
    `ended` is the limit that ended the run. `validation` is the validation loss of all workers, at the steps that have
    one. `residual`, `agreement` and `noise` are what a guard measured last (`laconic.Health`).

    >>> Report(worker=0, step=50, loss=2.5, seconds=10.0).seconds_left(Goal(steps=200))
    30.0
    """

    worker: int
    step: int
    loss: float
    seconds: float
    tokens: int = 0
    wire_bytes: int = 0
    framing_bytes: int = 0
    interface_bytes: int | None = None
    communication_seconds: float = 0.0
    link_seconds: float = 0.0
    level_bytes: dict[str, int] = field(default_factory=dict)
    ended: Ending = ""
    validation: float | None = None
    residual: float | None = None
    agreement: float | None = None
    noise: float | None = None

    @staticmethod
    def read(line: str) -> Report:
        """Read a line of a worker's file."""
        return Report(**json.loads(line))

    def seconds_left(self, goal: Goal) -> float | None:
        """Estimate of the remaining time; None if the run has no limit."""
        if self.ended:
            return 0.0
        left = [self.seconds / self.step * (goal.steps - self.step)] if goal.steps and self.step else []
        left += [goal.seconds - self.seconds] if goal.seconds else []
        return max(0.0, min(left)) if left else None


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
    `wire_bytes` is what a worker sends, `network_bytes` the same with the headers of gloo and TCP, and
    `interface_bytes` the count of the worker's network interface in the same time, if it has its own.
    `communication_seconds` is the time during which a collective was in flight, with or without computation;
    `waiting_seconds` is the part of it spent waiting for slower workers. `loss_of` names the loss that is reported and
    compared with `until_loss`: the validation loss, of which `validations` has every value, or the training loss, of
    which `curve` has the smoothed values.
    With `clock` "computed", the seconds of the link are computed from the bytes; all others are measured.
    """

    plan: Plan
    model: str
    parameters: int
    workers: int
    steps: int
    seconds: float
    communication_seconds: float
    tokens_per_s: float
    wire_bytes: int
    loss_start: float
    loss_final: float
    loss_of: str = "validation"
    ended: Ending = "steps"
    until_loss: float | None = None
    link: str | None = None
    clock: str = "measured"
    without_link: bool = False
    waiting_seconds: float | None = None
    network_bytes: int = 0
    interface_bytes: int | None = None
    level_bytes: dict[str, int] = field(default_factory=dict)
    uplink_bytes: dict[str, int] = field(default_factory=dict)
    curve: tuple[Point, ...] = ()
    validations: tuple[Point, ...] = ()
    changed_to: str | None = None
    """The plan at the end, if the run has changed it."""
    residual: float | None = None
    """What a guard measured last: how many mean gradients, or deltas, lag behind."""
    agreement: float | None = None
    """What a guard measured last: how much the workers' gradients, or deltas, have in common."""
    noise: float | None = None
    """What a guard measured last: the gradient noise scale, in batches of one worker."""
    settings: str = ""
    """The run and its link, as text: another run with the same text need not be run again."""

    @property
    def label(self) -> str:
        """The name of the run in tables and figures."""
        return label(self.plan, self.without_link, self.changed_to)

    @property
    def reached(self) -> bool:
        """Whether the run ended at its target loss."""
        return self.ended == "loss"


# --- the files of a run ---


def report_file(folder: Path, worker: int) -> Path:
    """The file to which a worker writes its reports, as JSON lines."""
    return folder / f"worker-{worker}.jsonl"


def seconds_file(folder: Path, worker: int) -> Path:
    """The file to which a worker writes the seconds of each collective, as doubles."""
    return folder / f"worker-{worker}.seconds"


def about_file(folder: Path) -> Path:
    """The file to which worker 0 writes the plan and the number of parameters."""
    return folder / "about.json"


def end_file(folder: Path, worker: int) -> Path:
    """The file that a worker makes when it comes to the end of its script without an error."""
    return folder / f"worker-{worker}.end"


def read_reports(folder: Path, worker: int) -> list[Report]:
    """What a worker has reported, in order; the last report of each step."""
    found = (Report.read(line) for line in Tail(report_file(folder, worker)).read())
    return list({report.step: report for report in found}.values())


def has_ended(folder: Path, worker: int) -> bool:
    """Whether a worker has reached the goal of the run, or has come to the end of its script without an error."""
    reports = read_reports(folder, worker)
    return bool(reports) and (bool(reports[-1].ended) or end_file(folder, worker).exists())


def read_outcome(run: TrainingRun, folder: Path, only_worker: int | None = None) -> Outcome:
    """Read the outcome of a run from its folder. With `only_worker`, the folder has the files of that worker alone."""
    workers = range(run.workers) if only_worker is None else [only_worker]
    reports = [read_reports(folder, worker) for worker in workers]
    if not all(reports):
        raise UsageError(
            f"{run.training.title}: it ended without a report from every worker. Call session.report(loss=...) after "
            "each step on every worker, where session = laconic.attach(laconic.plan_from_env(), model, optimizer)."
        )
    about: dict[str, Any] = json.loads(about_file(folder).read_text())
    if about["plan"] != repr(run.plan):
        raise UsageError(
            f"{run.training.title}: it was started with plan {run.plan} and ran {about['plan']}. "
            "Attach laconic.plan_from_env()."
        )
    points, lasts = curve(reports), [of_one[-1] for of_one in reports]
    first, validated = lasts[0], [loss for report in reports[0] if (loss := report.validation) is not None]
    losses = validated or [point.loss for point in points]
    counted = [last.interface_bytes for last in lasts if last.interface_bytes is not None]
    outcome: dict[str, Any] = {}
    if only_worker is None:
        busy_s = fmean(last.communication_seconds - last.link_seconds for last in lasts)
        outcome["waiting_seconds"] = waiting_share([_seconds(folder, worker) for worker in workers]) * busy_s
        outcome["interface_bytes"] = round(fmean(counted)) if counted else None
    return Outcome(
        plan=run.plan,
        model=run.training.name,
        parameters=int(about["parameters"]),
        changed_to=about.get("changed_to"),
        residual=first.residual,
        agreement=first.agreement,
        noise=first.noise,
        workers=run.workers,
        steps=first.step,
        seconds=first.seconds,
        communication_seconds=fmean(last.communication_seconds for last in lasts),
        tokens_per_s=fmean(last.tokens / last.seconds for last in lasts) * run.workers,
        wire_bytes=first.wire_bytes,
        network_bytes=first.wire_bytes + first.framing_bytes,
        loss_of="validation" if validated else "training",
        loss_start=losses[0],
        loss_final=losses[-1],
        ended=first.ended or "steps",
        until_loss=run.goal.until_loss,
        without_link=run.without_link,
        level_bytes=first.level_bytes,
        curve=thinned(points),
        validations=thinned(validation_points(reports[0])),
        **outcome,
    )


def _seconds(folder: Path, worker: int) -> array.array[float]:
    content = seconds_file(folder, worker).read_bytes()
    return array.array("d", content[: len(content) // 8 * 8])


def curve(reports: Sequence[Sequence[Report]]) -> list[Point]:
    """The loss at each step: the mean over the last reports and all workers. Seconds and bytes are worker 0's."""
    recent: deque[float] = deque(maxlen=SMOOTHED)
    points = []
    for of_all in zip(*reports, strict=False):
        first = of_all[0]
        if first.step:  # a report before the first step has a validation loss only
            recent.append(fmean(report.loss for report in of_all))
            points.append(Point(first.step, round(first.seconds, 4), round(fmean(recent), 5), first.wire_bytes))
    return points


def validation_points(reports: Sequence[Report]) -> list[Point]:
    """The validation loss at each step that has one, with the seconds and bytes of that worker."""
    found = [(each, each.validation) for each in reports if each.validation is not None and each.step]
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


# --- a file of results ---


def as_row(outcome: Outcome) -> dict[str, Any]:
    """The fields of an outcome for JSON: the plan as text, and null for NaN and infinity."""
    text = json.dumps({each.name: getattr(outcome, each.name) for each in fields(outcome)}, default=_plain)
    row: dict[str, Any] = json.loads(text, parse_constant=lambda name: None)
    return row


def _plain(value: object) -> object:
    return asdict(value) if isinstance(value, Point) else str(value)


def read_results(path: Path, option: str = "--json") -> list[Outcome]:
    """Read the outcomes of a file that `laconic compare --json` has written."""
    try:
        return [_outcome(row) for row in json.loads(path.read_text())]
    except OSError as error:
        raise UsageError(f"{option} {path}: it cannot be read ({error.strerror or error}).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{option} {path}: this is no file of results ({error}). Give one that laconic compare --json has written."
        ) from error


def _outcome(row: dict[str, Any]) -> Outcome:
    given = {each.name: row[each.name] for each in fields(Outcome)}
    given["plan"] = laconic.plan(given["plan"])
    for name in ("loss_start", "loss_final"):
        given[name] = _number(given[name])
    for name in ("curve", "validations"):
        given[name] = tuple(Point(**point | {"loss": _number(point["loss"])}) for point in given[name])
    return Outcome(**given)


def _number(value: float | None) -> float:
    return nan if value is None else value
