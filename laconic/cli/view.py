"""The display while workers train: a live table in a terminal, lines of text elsewhere."""

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

from laconic.cli.results import closing_table
from laconic.cli.tables import PLAIN_WIDTH, PipedConsole
from laconic.plans.methods import alone, ddp
from laconic.tools.compare.judging import kept, kept_beside
from laconic.tools.compare.records import Outcome, Report
from laconic.tools.compare.report.sentence import headline
from laconic.tools.compare.runs import Goal, TrainingRun
from laconic.tools.units import human_bytes, percent

BARS = "▁▂▃▄▅▆▇█"
HEADINGS = ("step", "loss", "valid", "kept", "tok/s", "comm", "sent", "MB/s", "left")
HEALTH = ("behind", "agree")
"""The columns of what a guard measures, shown where one does."""
LONGER = {
    "valid": "validation",
    "tok/s": "tokens/s",
    "comm": "communication",
    "behind": "residual",
    "agree": "agreement",
}
TREND_WIDTH = 8
PLAIN_LINES = 10  # for one run of known length
PLAIN_SECONDS = 10.0  # the longest time without a line


class View:
    """Shows runs one after another, each by its worker 0. This class shows nothing; its subclasses do."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        """Those of the runs that have ended, in their order."""

    def message(self, line: str) -> None:
        """Show a message about the whole command."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Show progress while the block runs."""
        yield

    def progress(self, index: int, report: Report) -> None:
        """Show how far a run is."""

    def finish(self, outcome: Outcome) -> None:
        """Show the end of a run."""
        self.outcomes.append(outcome)

    def results(self, outcomes: Sequence[Outcome]) -> None:
        """Show the closing table."""


class PlainView(View):
    """Prints about ten lines for each run."""

    def __init__(self, runs: Sequence[TrainingRun]) -> None:
        super().__init__()
        self._console = PipedConsole(width=PLAIN_WIDTH, highlight=False)
        self._runs = runs
        self._next: dict[int, tuple[int, float]] = {}  # the step and the time of a run's next line
        self._validated = Validated()

    def message(self, line: str) -> None:
        """Print a line."""
        self._console.print(line, markup=False, soft_wrap=True)

    def progress(self, index: int, report: Report) -> None:
        """Print a line every tenth of the steps, or after ten seconds."""
        run, (step, second) = self._runs[index], self._next.get(index, (1, 0.0))
        report, share_kept = self._validated.latest(index, report, self.outcomes)
        now = time.monotonic()
        ended = second == math.inf  # what comes after is the final validation, which `finish` prints
        if report.step and not ended and (report.step >= step or now >= second or report.ended):
            stride = max(1, run.goal.steps // PLAIN_LINES) if run.goal.steps else sys.maxsize
            self._next[index] = (report.step + stride, math.inf if report.ended else now + PLAIN_SECONDS)
            self.message(plain_line(run, report, share_kept))

    def finish(self, outcome: Outcome) -> None:
        """Print the results of the run."""
        super().finish(outcome)
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


class LiveView(View):
    """A table with a row for each run, redrawn in place."""

    def __init__(self, runs: Sequence[TrainingRun]) -> None:
        super().__init__()
        self._console = Console()
        self._runs = runs
        self._latest: dict[int, tuple[Report, float | None]] = {}
        self._validated = Validated()
        self._losses: list[list[float]] = [[] for _ in runs]
        self._live = Live(console=self._console, get_renderable=self._table, refresh_per_second=8, transient=True)

    def message(self, line: str) -> None:
        """Print a line above the table."""
        self._console.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Draw the table; at the end remove it and restore the cursor."""
        with self._live:
            yield

    def progress(self, index: int, report: Report) -> None:
        """Keep it for the next redraw."""
        self._latest[index] = self._validated.latest(index, report, self.outcomes)
        if report.step:
            self._losses[index].append(report.loss)

    def results(self, outcomes: Sequence[Outcome]) -> None:
        """Print the closing table, and what it says."""
        self._console.print(closing_table(outcomes))
        if len(outcomes) > 1:
            self._console.print(headline(outcomes), markup=False, highlight=False)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("", overflow="fold")
        table.add_column("", no_wrap=True, width=TREND_WIDTH)
        guarded = any(report.residual is not None for report, _ in self._latest.values())
        headings = HEADINGS + HEALTH * guarded
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for index, run in enumerate(self._runs):
            trend = f"[cyan]{sparkline(self._losses[index], TREND_WIDTH)}[/cyan]"
            known = self._latest.get(index)
            numbers = ["-"] * len(headings) if known is None else cells(run.goal, *known, guarded)
            table.add_row(escape(run.label), trend, *numbers)
        return table


def make_view(runs: Sequence[TrainingRun], plain: bool) -> View:
    """Choose the view for stdout: a live table in a terminal or a notebook, lines elsewhere."""
    live = sys.stdout.isatty() or Console().is_jupyter
    return LiveView(runs) if live and not plain else PlainView(runs)


class Validated:
    """The last validation of each run, and what it had kept then."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float | None, float | None]] = {}

    def latest(self, index: int, report: Report, ended: Sequence[Outcome]) -> tuple[Report, float | None]:
        """Return the report with the last validation loss, and what the run kept at that step."""
        if report.validation is not None:
            self._last[index] = report.validation, kept_so_far(report, ended)
        loss, share_kept = self._last.get(index, (None, None))
        return replace(report, validation=loss), share_kept


def kept_so_far(report: Report, ended: Sequence[Outcome]) -> float | None:
    """What a run keeps at this step; None if there is nothing to compare it with, or mere noise."""
    if report.validation is None:
        return None
    found = {each.plan: {point.step: point.loss for point in each.validations} for each in ended}
    floor, top = (found.get(plan, {}).get(report.step) for plan in (alone(), ddp()))
    return None if floor is None or top is None else kept_beside(ended, floor, report.validation, top)


def cells(goal: Goal, report: Report, kept: float | None = None, guarded: bool = False) -> list[str]:
    """The formatted numbers of a row, as in HEADINGS; and those of the guard, as in HEALTH."""
    measured = (report.residual, report.agreement) if guarded else ()
    seconds, left = report.seconds or 1.0, report.seconds_left(goal)
    return [
        f"{report.step}/{goal.steps}" if goal.steps else str(report.step),
        f"{report.loss:.3f}",
        "-" if report.validation is None else f"{report.validation:.3f}",
        percent(kept),
        f"{report.tokens / seconds:,.0f}" if report.tokens else "-",  # a script need not report them
        f"{report.communication_seconds / seconds:.0%}",
        human_bytes(report.wire_bytes),
        f"{report.wire_bytes / seconds / 1e6:.2f}",
        "done" if report.ended else "-" if left is None else f"{left:.0f}s",
        *("-" if each is None else f"{each:.2f}" for each in measured),
    ]


def plain_line(run: TrainingRun, report: Report, kept: float | None = None) -> str:
    """The progress as one line of names and values.

    >>> plain_line(TrainingRun(ddp(), goal=Goal(steps=3)), Report(worker=0, step=1, loss=5.5, seconds=2, tokens=1800))
    'ddp() step=1/3 loss=5.500 validation=- kept=- tokens/s=900 communication=0% sent=0 B MB/s=0.00 left=4s'
    """
    guarded = report.residual is not None
    names = (LONGER.get(heading, heading) for heading in HEADINGS + HEALTH * guarded)
    numbers = cells(run.goal, report, kept, guarded)
    return " ".join([run.label, *(f"{name}={cell}" for name, cell in zip(names, numbers, strict=True))])


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
