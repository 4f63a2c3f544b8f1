"""What all commands write: tables and lines on stdout, and files."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from laconic.atomic_write import write_temporary
from laconic.tools.errors import UsageError

PLAIN_WIDTH = 120


class PipedConsole(Console):
    """A console whose reader may leave, as in `laconic compare | head`: the run goes on, and prints nothing more."""

    def on_broken_pipe(self) -> None:
        """Discard all further output, also what Python flushes at its exit."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console(plain: bool = False) -> Console:
    """The console of stdout: as wide as a terminal, or of a fixed width elsewhere and for `plain`."""
    live = not plain and (sys.stdout.isatty() or Console().is_jupyter)
    return Console(highlight=False) if live else PipedConsole(width=PLAIN_WIDTH, highlight=False)


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str | Text]], title: str = "", left: Collection[str] = ()
) -> Table:
    """A table whose first column is text that wraps, such as a plan, and whose other columns are numbers.

    `left` names further columns of text. Cells are printed as they are, without markup; a `Text` has its own style.
    """
    made = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        if index == 0 or heading in left:
            made.add_column(heading, overflow="fold")
        else:
            made.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return made


def check_writable(path: Path, option: str = "--json") -> None:
    """Refuse, before any training, a file that could not be written after it."""
    if path.is_dir():
        example = path / ("results.html" if option == "--report" else "results.json")
        raise UsageError(f"{option} {path}: that is a folder. Name a file in it, such as {example}.")
    try:
        write_temporary(path).unlink()
    except OSError as error:
        raise UsageError(
            f"{option} {path}: no file can be written in {path.absolute().parent} ({error.strerror}). "
            "Choose a folder that exists and that you may write to."
        ) from error
