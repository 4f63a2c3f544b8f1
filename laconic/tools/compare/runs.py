"""The runs of a comparison: what is trained with which plan, what workers report of it, and the outcome.

A run is checked before any worker starts. Any script that torchrun can start works, if it attaches
`laconic.plan_from_env()` and calls `session.report(loss=...)`.
"""

from __future__ import annotations

import array
import json
import os
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import laconic
from laconic.plans.plan import Plan
from laconic.session import observers
from laconic.tools.errors import UsageError, check_count, check_positive, check_script
from laconic.tools.lab.tasks import STEPS, Lab
from laconic.tools.launch.links import Link
from laconic.tools.launch.output import Tail, worker_file
from laconic.tools.launch.workers import WorkerNetwork, run_workers

VALIDATE_EVERY = 5
SMOOTHED = 8  # reports in the mean training loss
MOST_POINTS = 400
FOLDER, REPORTER = "LACONIC_REPORT", "laconic.tools.compare.reporter:from_env"
"""The environment variable with the folder that workers report to, and the observer that does so."""
REPORTS, SECONDS, END = "jsonl", "seconds", "end"
"""The files of each worker: its reports, as JSON lines; the seconds of each collective, as doubles; one that it makes
when it comes to the end of its script without an error."""
GOAL, ABOUT = "goal.json", "about.json"
"""The files of the run: what the reporters need, and the plan and the number of parameters, from worker 0."""

Ending = Literal["", "steps", "seconds", "loss"]


@dataclass(frozen=True)
class Goal:
    """When a run ends: at the first of these that it reaches. None sets no limit. And how often it is validated.

    `validate_every` counts reports, where the script gives a function that computes its validation loss.
    """

    steps: int | None = None
    seconds: float | None = None
    until_loss: float | None = None
    validate_every: int = VALIDATE_EVERY

    def __post_init__(self) -> None:
        for name in ("steps", "validate_every"):
            check_count(name, getattr(self, name))
        for name in ("seconds", "until_loss"):
            check_positive(name, getattr(self, name))


@dataclass(frozen=True)
class Script:
    """A user's script and its arguments."""

    path: Path
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_script(self.path)

    @property
    def title(self) -> str:
        """What error messages call the training."""
        return f"--script {self.path}"

    @property
    def name(self) -> str:
        """What results call the training."""
        return self.path.name

    def command(self, steps: int | None) -> list[str]:
        """The command of a worker."""
        return [sys.executable, str(self.path), *self.arguments]


@dataclass(frozen=True)
class TrainingRun:
    """One run of a training with a plan, on the workers of this machine; with the slow link or without.

    >>> from laconic import ddp
    >>> TrainingRun(ddp(), goal=Goal(steps=10)).label
    'ddp()'
    """

    plan: Plan
    training: Lab | Script = field(default_factory=Lab)
    workers: int = 4
    goal: Goal = Goal(STEPS)
    without_link: bool = False

    def __post_init__(self) -> None:
        check_count("workers", self.workers)

    @property
    def label(self) -> str:
        """The name of the run in tables and figures."""
        return label(self.plan, self.without_link)


def label(plan: Plan, without_link: bool, changed_to: str | None = None) -> str:
    """The plan, what the run changed it to, and whether it runs without the slow link of the others.

    >>> from laconic import ddp
    >>> label(ddp(), without_link=True)
    'ddp() without the slow link'
    """
    shown = f"{plan}" if changed_to is None else f"{plan} -> {changed_to}"
    return f"{shown} without the slow link" if without_link else shown


# What a run has measured.


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
    waiting_seconds: float = 0.0
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


# How it is run.


def launch(run: TrainingRun, folder: Path, network: WorkerNetwork | None = None) -> Outcome:
    """Run all workers to the end and return the outcome. Their reports and their logs go to `folder`."""
    network = network or WorkerNetwork()
    write_goal(folder, run.goal, network.computed)

    def reached(worker: int) -> str:
        reports = read_reports(folder, worker)
        return f" {f'after step {reports[-1].step}' if reports else 'at start'}, with plan {run.plan}"

    before = network.uplink_bytes()
    run_workers(
        run.training.command(run.goal.steps),
        run.workers,
        folder,
        network,
        title=run.training.title,
        variables=report_variables(run, folder),
        reached=reached,
        has_ended=lambda worker: has_ended(folder, worker),
    )
    return replace(
        read_outcome(run, folder),
        link=None if network.link is None else str(network.link),
        clock=network.clock,
        uplink_bytes={name: count - before[name] for name, count in network.uplink_bytes().items()},
        settings=describe(run, network),
    )


def write_goal(folder: Path, goal: Goal, computed: Link | None) -> None:
    """Write what the reporters of a run need: its goal, and the link whose time they compute, if any."""
    content = {"goal": asdict(goal), "computed": None if computed is None else str(computed)}
    (folder / GOAL).write_text(json.dumps(content))


def report_variables(run: TrainingRun, folder: Path) -> dict[str, str]:
    """The environment variables that give a script its plan and let it report to `folder`."""
    others = os.environ.get(observers.VARIABLE)
    named = REPORTER if others is None else f"{others},{REPORTER}"
    return {"LACONIC_PLAN": repr(run.plan), FOLDER: str(folder), observers.VARIABLE: named}


def describe(run: TrainingRun, network: WorkerNetwork) -> str:
    """The settings that the results of a run depend on, as text."""
    return f"{run!r}, {network.clock} link: {network.link}"


# How its outcome is read.


def read_reports(folder: Path, worker: int) -> list[Report]:
    """What a worker has reported, in order; the last report of each step."""
    found = (Report.read(line) for line in Tail(worker_file(folder, worker, REPORTS)).read())
    return list({report.step: report for report in found}.values())


def has_ended(folder: Path, worker: int) -> bool:
    """Whether a worker has reached the goal of the run, or has come to the end of its script without an error."""
    reports = read_reports(folder, worker)
    return bool(reports) and (bool(reports[-1].ended) or worker_file(folder, worker, END).exists())


def read_outcome(run: TrainingRun, folder: Path) -> Outcome:
    """Read the outcome of a run from its folder."""
    reports = [read_reports(folder, worker) for worker in range(run.workers)]
    if not all(reports):
        raise UsageError(
            f"{run.training.title}: it ended without a report from every worker. Call session.report(loss=...) after "
            "each step on every worker, where session = laconic.attach(laconic.plan_from_env(), model, optimizer)."
        )
    about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
    if about["plan"] != repr(run.plan):
        raise UsageError(
            f"{run.training.title}: it was started with plan {run.plan} and ran {about['plan']}. "
            "Attach laconic.plan_from_env()."
        )
    points, lasts = curve(reports), [of_one[-1] for of_one in reports]
    first, validated = lasts[0], [loss for report in reports[0] if (loss := report.validation) is not None]
    losses = validated or [point.loss for point in points]
    counted = [last.interface_bytes for last in lasts if last.interface_bytes is not None]
    busy_s = fmean(last.communication_seconds - last.link_seconds for last in lasts)
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
        waiting_seconds=waiting_share([_seconds(folder, worker) for worker in range(run.workers)]) * busy_s,
        interface_bytes=round(fmean(counted)) if counted else None,
    )


def _seconds(folder: Path, worker: int) -> array.array[float]:
    content = worker_file(folder, worker, SECONDS).read_bytes()
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


# A file of results.


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
