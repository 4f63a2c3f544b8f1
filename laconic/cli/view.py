"""The display while workers train: a live table in a terminal, lines of text elsewhere."""

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from laconic.cli.results import closing_table
from laconic.cli.tables import PLAIN_WIDTH, PipedConsole
from laconic.tools.compare.judging import kept, kept_share
from laconic.tools.compare.progress import Progress
from laconic.tools.compare.records import Outcome
from laconic.tools.compare.report.sentence import headline
from laconic.tools.units import human_bytes, share

BARS = "▁▂▃▄▅▆▇█"
HEADINGS = ("step", "loss", "valid", "kept", "tok/s", "talk", "sent", "MB/s", "left")
HEALTH = ("behind", "agree")
"""The columns of what a guard measures, shown where one does."""
TREND_WIDTH = 8
PLAIN_LINES = 10  # for one run of known length
PLAIN_SECONDS = 10.0  # the longest time without a line


@dataclass(frozen=True)
class Row:
    """One worker of one run, both counted from 0."""

    run: int
    worker: int


class View:
    """Shows runs one after another. This class shows nothing; subclasses override what they show."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        """Those of the runs that have ended, in their order."""

    def message(self, line: str) -> None:
        """Show a message about the whole command."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Show progress while the block runs."""
        yield

    def progress(self, row: Row, progress: Progress) -> None:
        """Show the progress of a worker."""

    def finish(self, outcome: Outcome) -> None:
        """Show the end of a run."""
        self.outcomes.append(outcome)

    def results(self, outcomes: Sequence[Outcome]) -> None:
        """Show the closing table."""


class PlainView(View):
    """Prints about ten lines for each run."""

    def __init__(self, labels: Mapping[Row, str]) -> None:
        super().__init__()
        self._console = PipedConsole(width=PLAIN_WIDTH, highlight=False)
        self._labels = labels
        self._next: dict[Row, tuple[int, float]] = {}  # the step and the time of a row's next line
        self._validated = Validated()

    def message(self, line: str) -> None:
        """Print a line."""
        self._console.print(line, markup=False, soft_wrap=True)

    def progress(self, row: Row, progress: Progress) -> None:
        """Print a line every tenth of the steps, or after ten seconds."""
        if row not in self._labels:
            return
        progress, share_kept = self._validated.latest(row, progress, self.outcomes)
        step, second = self._next.get(row, (0, 0.0))
        now = time.monotonic()
        if progress.step >= step or now >= second or progress.ended:
            stride = max(1, progress.steps // PLAIN_LINES) if progress.steps else sys.maxsize
            self._next[row] = (progress.step + stride, now + PLAIN_SECONDS)
            self.message(plain_line(self._labels[row], progress, share_kept))

    def finish(self, outcome: Outcome) -> None:
        """Print the results of the run."""
        super().finish(outcome)
        self.message(
            f"{outcome.label} done {outcome.loss_of}_loss={outcome.loss_start:.3f}->{outcome.loss_final:.3f} "
            f"sent={human_bytes(outcome.sent_bytes)} took={outcome.seconds:.1f}s"
            f" kept={share(kept(outcome, self.outcomes))}"
        )

    def results(self, outcomes: Sequence[Outcome]) -> None:
        """Print the closing table, and what it says."""
        self._console.print(closing_table(outcomes))
        if len(outcomes) > 1:
            self.message(headline(outcomes))


class LiveView(View):
    """A table with a row for each run or worker, redrawn in place."""

    def __init__(self, labels: Mapping[Row, str]) -> None:
        super().__init__()
        self._console = Console()
        self._labels = labels
        self._latest: dict[Row, tuple[Progress, float | None]] = {}
        self._validated = Validated()
        self._losses: dict[Row, list[float]] = {row: [] for row in labels}
        self._live = Live(console=self._console, get_renderable=self._table, refresh_per_second=8, transient=True)

    def message(self, line: str) -> None:
        """Print a line above the table."""
        self._console.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Draw the table; at the end remove it and restore the cursor."""
        with self._live:
            yield

    def progress(self, row: Row, progress: Progress) -> None:
        """Keep it for the next redraw."""
        if row in self._labels:
            self._latest[row] = self._validated.latest(row, progress, self.outcomes)
            self._losses[row].append(progress.loss)

    def results(self, outcomes: Sequence[Outcome]) -> None:
        """Print the closing table, and what it says."""
        self._console.print(closing_table(outcomes))
        if len(outcomes) > 1:
            self.message(headline(outcomes))

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("", overflow="fold")
        table.add_column("", no_wrap=True, width=TREND_WIDTH)
        guarded = any(progress.residual is not None for progress, _ in self._latest.values())
        headings = HEADINGS + HEALTH * guarded
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for row, label in self._labels.items():
            trend = f"[cyan]{sparkline(self._losses[row], TREND_WIDTH)}[/cyan]"
            numbers = cells(*self._latest[row], guarded) if row in self._latest else ["-"] * len(headings)
            table.add_row(escape(label), trend, *numbers)
        return table


def make_view(labels: Mapping[Row, str], plain: bool) -> View:
    """Choose the view for stdout: a live table in a terminal or a notebook, lines elsewhere."""
    live = sys.stdout.isatty() or Console().is_jupyter
    return LiveView(labels) if live and not plain else PlainView(labels)


class Validated:
    """The last validation of each row, and what its run had kept then."""

    def __init__(self) -> None:
        self._last: dict[Row, tuple[float | None, float | None]] = {}

    def latest(self, row: Row, progress: Progress, ended: Sequence[Outcome]) -> tuple[Progress, float | None]:
        """Return the progress with the last validation loss, and the share that was kept at that step."""
        if progress.validation is not None:
            self._last[row] = progress.validation, kept_so_far(progress, ended)
        loss, share_kept = self._last.get(row, (None, None))
        return replace(progress, validation=loss), share_kept


def kept_so_far(progress: Progress, ended: Sequence[Outcome]) -> float | None:
    """The share of what talking gives that a run keeps at this step; None if there is nothing to compare it with."""
    if progress.validation is None:
        return None
    silent, ddp = (next((each for each in ended if each.plan == plan), None) for plan in ("alone()", "ddp()"))
    at = [{p.step: p.loss for p in each.validations}.get(progress.step) for each in (silent, ddp) if each is not None]
    return kept_share(at[0], progress.validation, at[1]) if len(at) == 2 and None not in at else None  # type: ignore[arg-type]


def cells(progress: Progress, kept: float | None = None, guarded: bool = False) -> list[str]:
    """The formatted numbers of a row, as in HEADINGS; and those of the guard, as in HEALTH."""
    measured = (progress.residual, progress.agreement) if guarded else ()
    seconds = progress.seconds or 1.0
    has_limit = progress.steps or progress.seconds_limit
    return [
        f"{progress.step}/{progress.steps}" if progress.steps else str(progress.step),
        f"{progress.loss:.3f}",
        "-" if progress.validation is None else f"{progress.validation:.3f}",
        share(kept),
        f"{progress.tokens_per_s:,.0f}" if progress.tokens_per_s else "-",  # a script need not report them
        f"{progress.communication_s / seconds:.0%}",
        human_bytes(progress.sent_bytes),
        f"{progress.wire_bytes / seconds / 1e6:.2f}",
        "done" if progress.ended else f"{progress.seconds_left:.0f}s" if has_limit else "-",
        *("-" if each is None else f"{each:.2f}" for each in measured),
    ]


def plain_line(label: str, progress: Progress, kept: float | None = None) -> str:
    """The progress as one line of names and values.

    >>> now = Progress(worker=0, step=1, steps=3, loss=5.5, tokens_per_s=900, sent_bytes=8, seconds=2)
    >>> plain_line("ddp()", now)
    'ddp() step=1/3 loss=5.500 validation=- kept=- tokens/s=900 talking=0% sent=8 B MB/s=0.00 left=4s'
    """
    longer = {"talk": "talking", "valid": "validation", "tok/s": "tokens/s", "behind": "residual", "agree": "agreement"}
    guarded = progress.residual is not None
    names = (longer.get(heading, heading) for heading in HEADINGS + HEALTH * guarded)
    numbers = cells(progress, kept, guarded)
    return " ".join([label, *(f"{name}={cell}" for name, cell in zip(names, numbers, strict=True))])


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
