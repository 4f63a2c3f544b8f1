"""The closing table of `compare`, and their result files."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from laconic.atomic_write import write_temporary
from laconic.cli.tables import table
from laconic.plans.methods import alone
from laconic.tools.compare.judging import efficiency, has_levels, kept, no_better_than_alone, reference, slow_bytes
from laconic.tools.compare.records import Outcome
from laconic.tools.errors import UsageError
from laconic.tools.units import human_bytes, percent, ratio


def closing_table(outcomes: Sequence[Outcome]) -> Table:
    """One row for each plan: its losses, what it keeps, the bytes sent, the seconds.

    Ratios are to `ddp()`, or else the first plan. The row of a plan says if it is no better than `alone()`.

    "fewer" counts the bytes of the outermost level alone. If plans also send inside groups, a column shows them.
    """
    first, levels = reference(outcomes), has_levels(outcomes)
    target = [] if first.until_loss is None else ["sooner", "efficiency"]
    seconds = "seconds" if first.until_loss is None else f"seconds\nto {first.until_loss:g}"
    seconds += "" if first.clock == "measured" else "\n(computed)"
    between = ["between\ngroups"] if levels else []
    headings = (
        "plan",
        f"{first.loss_of} loss",
        "kept",
        "sent\nby each",
        *between,
        "fewer",
        seconds,
        *target,
    )
    rows = [
        (
            outcome.label + ("\nno better than alone()" if no_better_than_alone(outcome, outcomes) else ""),
            f"{outcome.loss_start:.3f} -> {outcome.loss_final:.3f}",
            percent(kept(outcome, outcomes)),
            human_bytes(outcome.wire_bytes),
            *([human_bytes(slow_bytes(outcome))] if levels else []),
            "-" if outcome.plan == alone() else ratio(slow_bytes(first), slow_bytes(outcome)),
            f"{outcome.seconds:.1f}" if outcome.reached or not target else f"not in {outcome.seconds:.1f}",
            *(_target(first, outcome, outcomes) if target else []),
        )
        for outcome in outcomes
    ]
    return table(headings, rows, _title(first))


def _title(first: Outcome) -> str:
    until = f"{first.steps} steps" if first.until_loss is None else f"until {first.loss_of} loss {first.until_loss:g}"
    title = f"{first.model}, {first.parameters:,} parameters, {first.workers} workers, {until}"
    if first.link is not None:
        title += f", link {first.link}"
    return title if first.clock == "measured" else f"{title}, the link's time computed"


def _target(first: Outcome, outcome: Outcome, outcomes: Sequence[Outcome]) -> tuple[str, str]:
    speed = efficiency(outcome, outcomes)
    sooner = ratio(first.seconds, outcome.seconds) if outcome.reached and first.reached else "-"
    return sooner, "-" if speed is None else f"{speed:.2f}"


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
