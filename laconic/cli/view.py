"""What is seen while workers train: a table that moves in a terminal, plain lines anywhere else."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from laconic.cli.results import closing_table, human_bytes
from laconic.lab.progress import Progress
from laconic.lab.training import Outcome

PLAIN_WIDTH = 120
BAR_WIDTH = 12
PLAIN_LINES = 10  # for one run
PLAIN_SECONDS = 10.0  # and one at least this often


@dataclass(frozen=True)
class Row:
    """One worker of one run, both counted from 0."""

    run: int
    worker: int


class View(Protocol):
    """Shows runs that come one after another."""

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
        step, second = self._next.get(row, (0, 0.0))
        now = time.monotonic()
        if progress.step >= step or now >= second or progress.step == progress.steps:
            self._next[row] = (progress.step + max(1, progress.steps // PLAIN_LINES), now + PLAIN_SECONDS)
            self._say(plain_line(self._labels[row], progress))

    def finish(self, outcome: Outcome) -> None:
        """Prints how the run went."""
        self._say(
            f"{outcome.plan} done validation_loss={outcome.loss_start:.3f}->{outcome.loss_final:.3f} "
            f"sent={human_bytes(outcome.sent_bytes)} took={outcome.seconds:.1f}s"
        )

    def close(self) -> None:
        """Nothing."""

    def results(self, outcomes: Sequence[Outcome]) -> None:
        """Prints the closing table."""
        self._console.print(closing_table(outcomes))

    def _say(self, line: str) -> None:
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
        self._live = Live(console=self._console, get_renderable=self._table, refresh_per_second=8, transient=True)

    def start(self) -> None:
        """Starts to draw."""
        self._live.start()

    def progress(self, row: Row, progress: Progress) -> None:
        """Notes it for the next redraw."""
        self._latest[row] = progress

    def finish(self, outcome: Outcome) -> None:
        """Nothing: the row already shows its last step."""

    def close(self) -> None:
        """Wipes the moving table, and gives the terminal its cursor back."""
        self._live.stop()

    def results(self, outcomes: Sequence[Outcome]) -> None:
        """Prints the closing table."""
        self._console.print(closing_table(outcomes))

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for heading in ("", "", "step", "loss", "tokens/s", "sent", "left"):
            table.add_column(heading, justify="left" if heading == "" else "right")
        for row, label in self._labels.items():
            progress = self._latest.get(row)
            if progress is None:
                table.add_row(escape(label), ProgressBar(width=BAR_WIDTH, completed=0), *["-"] * 5)
            else:
                cells = cells_of(progress)
                bar = ProgressBar(total=progress.steps, completed=progress.step, width=BAR_WIDTH)
                table.add_row(escape(label), bar, cells.step, cells.loss, cells.tokens, cells.sent, cells.left)
        return table


@dataclass(frozen=True)
class Cells:
    """A progress in words."""

    step: str
    loss: str
    tokens: str
    sent: str
    left: str


def cells_of(progress: Progress) -> Cells:
    """The words for each number."""
    return Cells(
        step=f"{progress.step}/{progress.steps}",
        loss=f"{progress.loss:.3f}",
        tokens=f"{progress.tokens_per_s:,.0f}",
        sent=human_bytes(progress.sent_bytes),
        left=f"{progress.seconds_left:.0f}s",
    )


def plain_line(label: str, progress: Progress) -> str:
    """The progress as one line of words and values.

    >>> now = Progress(worker=0, step=1, steps=3, loss=5.5, tokens_per_s=900, sent_bytes=8, seconds=2)
    >>> plain_line("ddp()", now)
    'ddp() step=1/3 loss=5.500 tokens/s=900 sent=8 B left=4s'
    """
    cells = cells_of(progress)
    numbers = f"loss={cells.loss} tokens/s={cells.tokens} sent={cells.sent} left={cells.left}"
    return f"{label} step={cells.step} {numbers}"


def make_view(labels: Mapping[Row, str], plain: bool) -> View:
    """The view that fits where stdout goes."""
    return PlainView(labels) if plain or not sys.stdout.isatty() else LiveView(labels)
