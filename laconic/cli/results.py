"""What `train` and `compare` end with: the closing table, and the same numbers as JSON."""

import json
import math
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from laconic.lab.settings import LabError
from laconic.lab.training import Outcome


def human_bytes(count: float) -> str:
    """A number of bytes as people write it.

    >>> [human_bytes(n) for n in (999, 3_276_800, 629_145_600)]
    ['999 B', '3.28 MB', '629 MB']
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def times_fewer(first: int, other: int) -> str:
    """How many times fewer bytes `other` is than `first`.

    >>> times_fewer(1000, 31), times_fewer(1000, 1000), times_fewer(1000, 0)
    ('32.3x', '1.0x', '-')
    """
    return f"{first / other:.1f}x" if other else "-"


def closing_table(outcomes: Sequence[Outcome]) -> Table:
    """One row for each plan: what it learned, what it sent, how long it took."""
    first = outcomes[0]
    table = Table(
        title=f"{first.model}, {first.parameters:,} parameters, {first.workers} workers, {first.steps} steps",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("plan", overflow="fold")
    for heading in ("validation loss", "sent by each", "fewer", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(
            escape(outcome.plan),
            f"{outcome.loss_start:.3f} -> {outcome.loss_final:.3f}",
            human_bytes(outcome.sent_bytes),
            times_fewer(first.sent_bytes, outcome.sent_bytes),
            f"{outcome.seconds:.1f}",
        )
    return table


def check_writable(path: Path) -> None:
    """Tries, before any training, what `write_json` will do after it."""
    if path.is_dir():
        raise LabError(f"--json {path}: that is a folder. Name a file in it, such as {path / 'results.json'}.")
    try:
        _temporary_beside(path).unlink()
    except OSError as error:
        raise LabError(
            f"--json {path}: no file can be written in {path.absolute().parent} ({error.strerror}). "
            "Choose a folder that exists and that you may write to."
        ) from error


def write_json(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Writes a list with one object for each plan, whole or not at all."""
    objects = [_finite(asdict(outcome)) | {"versions": _versions()} for outcome in outcomes]
    temporary = _temporary_beside(path)
    temporary.write_text(json.dumps(objects, indent=2, allow_nan=False) + "\n")
    temporary.chmod(0o666 & ~_umask())
    temporary.replace(path)


def _temporary_beside(path: Path) -> Path:
    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    os.close(handle)
    return Path(name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _finite(row: dict[str, object]) -> dict[str, object]:
    """JSON has no NaN and no infinity: a loss that became one is null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _versions() -> dict[str, str]:
    return {"laconic": version("laconic"), "torch": torch.__version__, "python": platform.python_version()}
