"""What `laconic simulate` shows: a live table while workers train, lines elsewhere, and a closing table."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from laconic.cli.view import PLAIN_LINES, PLAIN_WIDTH, PipedConsole
from laconic.tools.simulate.clock import TimeUse
from laconic.tools.simulate.results import SimulatedOutcome
from laconic.tools.simulate.time_only import TimeOutcome
from laconic.tools.simulate.training import SimulatedStep
from laconic.tools.units import duration, human_bytes, share

_USE = ("computing", "stragglers", "link", "faults")


class SimulationView:
    """Shows simulated trainings, one after the other; nothing at all if `quiet`."""

    def __init__(self, steps: int, plain: bool, quiet: bool) -> None:
        self._steps, self._quiet = steps, quiet
        live = not (plain or quiet) and sys.stdout.isatty()
        self._console = Console() if live else PipedConsole(width=PLAIN_WIDTH, highlight=False)
        self._rows: dict[str, list[str]] = {}
        self._live = Live(console=self._console, get_renderable=self._table, transient=True) if live else None

    def __enter__(self) -> SimulationView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def progress(self, plan: str, step: SimulatedStep, use: TimeUse) -> None:
        """Show a step: in the live table, or about ten lines for each plan."""
        self._rows[plan] = [f"{step.step}/{self._steps}", *_cells(step), *_shares(use)]
        stride = max(1, self._steps // PLAIN_LINES)
        if self._live is None and not self._quiet and (step.step % stride == 0 or step.step in (1, self._steps)):
            loss, seconds, sent = _cells(step)
            line = f"{plan} step={step.step}/{self._steps} loss={loss} workers={len(step.losses)} time={seconds} "
            self._console.print(f"{line}sent={sent}", markup=False, soft_wrap=True)

    def results(self, outcomes: Sequence[SimulatedOutcome], title: str) -> None:
        """Print the closing table."""
        if self._quiet:
            return
        headings = ("loss", "validation", "time", "a step", "sent\nby each", *_USE)
        table = _empty(title, headings)
        for each in outcomes:
            loss, seconds, sent = _cells(each.last)
            valid = "-" if each.validation_loss is None else f"{each.validation_loss:.4f}"
            table.add_row(escape(each.plan), loss, valid, seconds, f"{each.step_s:.3g} s", sent, *_shares(each.use))
        self._console.print(table)

    def _table(self) -> Table:
        table = _empty("", ("step", "loss", "time", "sent\nby each", *_USE))
        for plan, cells in self._rows.items():
            table.add_row(escape(plan), *cells)
        return table


def time_table(outcomes: Sequence[TimeOutcome], parameters: int) -> None:
    """Print the times of runs without training."""
    first = outcomes[0]
    title = f"{parameters:,} parameters, {first.workers:,} workers, {first.steps} steps, the clock alone"
    table = _empty(title, ("time", "a step", "sent\na step", *_USE, "times\nlost"))
    for each in outcomes:
        numbers = (duration(each.seconds), f"{each.step_s:.3g} s", human_bytes(each.sent_bytes / each.steps))
        table.add_row(escape(each.plan), *numbers, *_shares(each.use), str(each.faults))
    PipedConsole(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False).print(table)


def _empty(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("plan", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _cells(step: SimulatedStep) -> tuple[str, str, str]:
    return f"{step.loss:.4f}", duration(step.seconds), human_bytes(step.sent_bytes)


def _shares(use: TimeUse) -> list[str]:
    return [share(each) for each in (use.computing, use.stragglers, use.link, use.faults)]
