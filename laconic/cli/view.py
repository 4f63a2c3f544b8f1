"""What is seen while workers train: a table that moves in a terminal, plain lines anywhere else."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from laconic.cli.cells import cells_of, plain_line, sparkline
from laconic.cli.results import closing_table
from laconic.compare.lab.training import Outcome
from laconic.compare.reporting import Progress
from laconic.compare.units import human_bytes

PLAIN_WIDTH = 120
TREND_WIDTH = 8
PLAIN_LINES = 10  # for one run of known length
PLAIN_SECONDS = 10.0  # and one at least this often


@dataclass(frozen=True)
class Row:
    """One worker of one run, both counted from 0."""

    run: int
    worker: int


class View(Protocol):
    """Shows runs that come one after another."""

    def say(self, line: str) -> None:
        """Something to know about all of them."""

    def start(self) -> None:
        """Called once, before the first run."""

    def progress(self, row: Row, progress: Progress) -> None:
        """A worker has done another step."""

    def finish(self, outcome: Outcome) -> None:
        """A run is over."""

    def close(self) -> None:
        """Called once, after the last run or in the middle of a failed one."""

    def results(self, outcomes: Sequence[Outcome]) -> None:
        """Shows the closing table."""


class SilentView:
    """Shows nothing: for the workers under torchrun that are not worker 0."""

    def say(self, line: str) -> None:
        """Nothing."""

    def start(self) -> None:
        """Nothing."""

    def progress(self, row: Row, progress: Progress) -> None:
        """Nothing."""

    def finish(self, outcome: Outcome) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def results(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing."""


class PlainView:
    """One line at a time, some ten for each run."""

    def __init__(self, labels: Mapping[Row, str]) -> None:
        self._console = Console(width=PLAIN_WIDTH, highlight=False)
        self._labels = labels
        self._next: dict[Row, tuple[int, float]] = {}  # the step, or the second, at which a row speaks again

    def start(self) -> None:
        """Nothing."""

    def progress(self, row: Row, progress: Progress) -> None:
        """Prints a line if the row has been silent for a tenth of its steps, or for ten seconds."""
        if row not in self._labels:
            return
        step, second = self._next.get(row, (0, 0.0))
        now = time.monotonic()
        if progress.step >= step or now >= second or progress.ended:
            self._next[row] = (
                progress.step + (max(1, progress.steps // PLAIN_LINES) if progress.steps else 10**9),
                now + PLAIN_SECONDS,
            )
            self.say(plain_line(self._labels[row], progress))

    def finish(self, outcome: Outcome) -> None:
        """Prints how the run went."""
        self.say(
            f"{outcome.plan} done {outcome.loss_of}_loss={outcome.loss_start:.3f}->{outcome.loss_final:.3f} "
            f"sent={human_bytes(outcome.sent_bytes)} took={outcome.seconds:.1f}s"
        )

    def close(self) -> None:
        """Nothing."""

    def results(self, outcomes: Sequence[Outcome]) -> None:
        """Prints the closing table."""
        self._console.print(closing_table(outcomes))

    def say(self, line: str) -> None:
        """Prints a line."""
        try:
            self._console.print(line, markup=False, soft_wrap=True)
        except BrokenPipeError:  # as in `laconic compare | head`: the run goes on unseen
            return


class LiveView:
    """A table with a row for each run or worker, redrawn in place."""

    def __init__(self, labels: Mapping[Row, str]) -> None:
        self._console = Console()
        self._labels = labels
        self._latest: dict[Row, Progress] = {}
        self._losses: dict[Row, list[float]] = {row: [] for row in labels}
        self._live = Live(console=self._console, get_renderable=self._table, refresh_per_second=8, transient=True)

    def say(self, line: str) -> None:
        """Prints a line above the table."""
        self._console.print(line, markup=False, soft_wrap=True)

    def start(self) -> None:
        """Starts to draw."""
        self._live.start()

    def progress(self, row: Row, progress: Progress) -> None:
        """Notes it for the next redraw."""
        if row in self._labels:
            self._latest[row] = progress
            self._losses[row].append(progress.loss)

    def finish(self, outcome: Outcome) -> None:
        """Nothing: the row already shows its last step."""

    def close(self) -> None:
        """Wipes the moving table, and gives the terminal its cursor back."""
        self._live.stop()

    def results(self, outcomes: Sequence[Outcome]) -> None:
        """Prints the closing table."""
        self._console.print(closing_table(outcomes))

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("", overflow="fold")
        table.add_column("", no_wrap=True, width=TREND_WIDTH)
        for heading in ("step", "loss", "tokens/s", "talk", "sent", "MB/s", "left"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row, label in self._labels.items():
            progress = self._latest.get(row)
            if progress is None:
                table.add_row(escape(label), "", *["-"] * 7)
            else:
                cells = cells_of(progress)
                trend = f"[cyan]{sparkline(self._losses[row], TREND_WIDTH)}[/cyan]"
                numbers = (cells.step, cells.loss, cells.tokens, cells.talking, cells.sent, cells.rate, cells.left)
                table.add_row(escape(label), trend, *numbers)
        return table


def make_view(labels: Mapping[Row, str], plain: bool) -> View:
    """The view that fits where stdout goes: a terminal, a notebook's cell, or anything else."""
    console = Console()
    moving = sys.stdout.isatty() or console.is_jupyter
    return LiveView(labels) if moving and not plain else PlainView(labels)
