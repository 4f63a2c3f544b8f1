"""The display of `compare`: a live table in a terminal or lines of text while workers train, then the closing table."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from laconic.cli.output import PLAIN_WIDTH, PipedConsole, table
from laconic.plans.methods import alone, ddp
from laconic.tools.compare.judging import cells, headline, kept, kept_beside, no_better_than_alone, reference
from laconic.tools.compare.runs import Goal, Outcome, Report, TrainingRun
from laconic.tools.units import human_bytes, percent

BARS = "▁▂▃▄▅▆▇█"
SHORTER = {
    "validation": "valid",
    "tokens/s": "tok/s",
    "communication": "comm",
    "residual": "behind",
    "agreement": "agree",
}
"""The headings of the live table that are not the names in the lines."""
TREND_WIDTH = 8
PLAIN_LINES = 10  # for one run of known length
PLAIN_SECONDS = 10.0  # the longest time without a line


class View:
    """Shows runs one after another, each by its worker 0: about ten lines for each."""

    def __init__(self, runs: Sequence[TrainingRun]) -> None:
        self.outcomes: list[Outcome] = []
        """Those of the runs that have ended, in their order."""
        self._runs = runs
        self._console: Console = PipedConsole(width=PLAIN_WIDTH, highlight=False)
        self._next: dict[int, tuple[int, float]] = {}  # the step and the time of a run's next line
        self._validated: dict[int, tuple[float | None, float | None]] = {}
        """The last validation loss of each run, and what it had kept then."""

    def message(self, line: str) -> None:
        """Print a line."""
        self._console.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Show progress while the block runs."""
        yield

    def progress(self, index: int, report: Report) -> None:
        """Print a line every tenth of the steps, or after ten seconds."""
        run, (step, second) = self._runs[index], self._next.get(index, (1, 0.0))
        report, share_kept = self._with_validation(index, report)
        now = time.monotonic()
        ended = second == math.inf  # what comes after is the final validation, which `finish` prints
        if report.step and not ended and (report.step >= step or now >= second or report.ended):
            stride = max(1, run.goal.steps // PLAIN_LINES) if run.goal.steps else sys.maxsize
            self._next[index] = (report.step + stride, math.inf if report.ended else now + PLAIN_SECONDS)
            self.message(plain_line(run, report, share_kept))

    def finish(self, outcome: Outcome) -> None:
        """Print the results of the run."""
        self.outcomes.append(outcome)
        self.message(
            f"{outcome.label} done {outcome.loss_of}_loss={outcome.loss_start:.3f}->{outcome.loss_final:.3f} "
            f"sent={human_bytes(outcome.wire_bytes)} took={outcome.seconds:.1f}s"
            f" kept={percent(kept(outcome, self.outcomes))}"
        )

    def results(self, outcomes: Sequence[Outcome]) -> None:
        """Print the closing table, and what it says."""
        self._console.print(closing_table(outcomes))
        if len(outcomes) > 1:
            self.message(headline(outcomes))

    def _with_validation(self, index: int, report: Report) -> tuple[Report, float | None]:
        """Return the report with the last validation loss, and what the run kept at that step."""
        if report.validation is not None:
            self._validated[index] = report.validation, kept_so_far(report, self.outcomes)
        loss, share_kept = self._validated.get(index, (None, None))
        return replace(report, validation=loss), share_kept


class LiveView(View):
    """A table with a row for each run, redrawn in place."""

    def __init__(self, runs: Sequence[TrainingRun]) -> None:
        super().__init__(runs)
        self._console = Console(highlight=False)
        self._latest: dict[int, tuple[Report, float | None]] = {}
        self._losses: list[list[float]] = [[] for _ in runs]
        self._live = Live(console=self._console, get_renderable=self._table, refresh_per_second=8, transient=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Draw the table; at the end remove it and restore the cursor."""
        with self._live:
            yield

    def progress(self, index: int, report: Report) -> None:
        """Keep it for the next redraw."""
        self._latest[index] = self._with_validation(index, report)
        if report.step:
            self._losses[index].append(report.loss)

    def finish(self, outcome: Outcome) -> None:
        """Keep the outcome: the closing table shows it."""
        self.outcomes.append(outcome)

    def _table(self) -> Table:
        made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        made.add_column("", overflow="fold")
        made.add_column("", no_wrap=True, width=TREND_WIDTH)
        guarded = any(report.residual is not None for report, _ in self._latest.values())
        nothing = Report(worker=0, step=0, loss=math.nan, seconds=0.0)
        for heading in progress_cells(Goal(), nothing, guarded=guarded):
            made.add_column(SHORTER.get(heading, heading), justify="right", no_wrap=True)
        for index, run in enumerate(self._runs):
            trend = f"[cyan]{sparkline(self._losses[index], TREND_WIDTH)}[/cyan]"
            known = self._latest.get(index)
            row = ["-"] * (len(made.columns) - 2)
            if known is not None:
                row = list(progress_cells(run.goal, *known, guarded).values())
            made.add_row(escape(run.label), trend, *row)
        return made


def make_view(runs: Sequence[TrainingRun], plain: bool) -> View:
    """Choose the view for stdout: a live table in a terminal or a notebook, lines elsewhere."""
    live = sys.stdout.isatty() or Console().is_jupyter
    return LiveView(runs) if live and not plain else View(runs)


def kept_so_far(report: Report, ended: Sequence[Outcome]) -> float | None:
    """What a run keeps at this step; None if there is nothing to compare it with, or mere noise."""
    if report.validation is None:
        return None
    found = {each.plan: {point.step: point.loss for point in each.validations} for each in ended}
    floor, top = (found.get(plan, {}).get(report.step) for plan in (alone(), ddp()))
    return None if floor is None or top is None else kept_beside(ended, floor, report.validation, top)


def progress_cells(goal: Goal, report: Report, kept: float | None = None, guarded: bool = False) -> dict[str, str]:
    """The progress of a run in numbers, by name; also what a guard measures, if `guarded`."""
    seconds, left = report.seconds or 1.0, report.seconds_left(goal)
    found = {
        "step": f"{report.step}/{goal.steps}" if goal.steps else str(report.step),
        "loss": f"{report.loss:.3f}",
        "validation": "-" if report.validation is None else f"{report.validation:.3f}",
        "kept": percent(kept),
        "tokens/s": f"{report.tokens / seconds:,.0f}" if report.tokens else "-",  # a script need not report them
        "communication": f"{report.communication_seconds / seconds:.0%}",
        "sent": human_bytes(report.wire_bytes),
        "MB/s": f"{report.wire_bytes / seconds / 1e6:.2f}",
        "left": "done" if report.ended else "-" if left is None else f"{left:.0f}s",
    }
    if guarded:
        found["residual"] = "-" if report.residual is None else f"{report.residual:.2f}"
        found["agreement"] = "-" if report.agreement is None else f"{report.agreement:.2f}"
    return found


def plain_line(run: TrainingRun, report: Report, kept: float | None = None) -> str:
    """The progress as one line of names and values.

    >>> plain_line(TrainingRun(ddp(), goal=Goal(steps=3)), Report(worker=0, step=1, loss=5.5, seconds=2, tokens=1800))
    'ddp() step=1/3 loss=5.500 validation=- kept=- tokens/s=900 communication=0% sent=0 B MB/s=0.00 left=4s'
    """
    found = progress_cells(run.goal, report, kept, guarded=report.residual is not None)
    return " ".join([run.label, *(f"{name}={cell}" for name, cell in found.items())])


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as bars between their minimum and their maximum; more values than `width` are averaged.

    >>> sparkline([3, 2, 2, 1], width=4)
    '█▅▅▁'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    width = min(width, len(finite))
    means = [fmean(finite[i * len(finite) // width : (i + 1) * len(finite) // width]) for i in range(width)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in means)


def closing_table(outcomes: Sequence[Outcome]) -> Table:
    """One row for each plan: its losses, what it keeps, the bytes sent, the seconds; and how they compare."""
    first = reference(outcomes)
    until = f"{first.steps} steps" if first.until_loss is None else f"until {first.loss_of} loss {first.until_loss:g}"
    title = f"{first.model}, {first.parameters:,} parameters, {first.workers} workers, {until}"
    title += "" if first.link is None else f", link {first.link}"
    title += "" if first.clock == "measured" else ", the link's time computed"
    rows = [cells(outcome, outcomes) for outcome in outcomes]
    if first.until_loss is None:  # "sooner" is for the same loss
        for row in rows:
            del row["sooner"]
    names = [
        each.label + ("\nno better than alone()" if no_better_than_alone(each, outcomes) else "") for each in outcomes
    ]
    shown = [(name, *row.values()) for name, row in zip(names, rows, strict=True)]
    return table(("plan", *rows[0]), shown, title)
