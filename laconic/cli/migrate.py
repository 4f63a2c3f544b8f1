"""`laconic migrate`: what to change in a training script to move it from torch's modules to laconic's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # LibCST is optional, and only this command needs it
    from laconic.migrate import Finding


def migrate(
    files: Annotated[list[Path], typer.Argument(help="Training scripts.", show_default=False)],
    write: Annotated[bool, typer.Option("--write", help="Change the imports in the files, and nothing else.")] = False,
) -> None:
    """List the imports to change and the known misuses in training scripts; they are read, never run.

    Exit code 0: nothing to do. 1: findings are left (after --write: those that it does not change). 2: a file is
    missing or is not Python; the other files are still read.
    """
    try:
        outcomes = [_migrate_one(file, write) for file in files]
    except ImportError as error:
        _complain(f"{error}")
        raise typer.Exit(2) from None
    raise typer.Exit(2 if None in outcomes else int(any(outcomes)))


def _migrate_one(file: Path, write: bool) -> int | None:
    """Return the number of findings left in a file; `None` if it could not be read or written."""
    from laconic import migrate as scripts

    try:
        script = scripts.read_script(file)
        findings = scripts.check(script)
        changed = scripts.rewrite(script) if write else script
        is_changed = changed.text != script.text
        left = scripts.check(changed) if is_changed else findings
        if is_changed:
            scripts.write(changed)
    except FileNotFoundError:
        _complain(f"{file}: there is no such file. Give the path of a training script.")
        return None
    except OSError as error:
        _complain(f"{file}: {error.strerror or error}. It must be a file that can be read, and written for --write.")
        return None
    except scripts.ScriptError as error:
        _complain(str(error))
        return None
    for finding in findings:
        _show(file, finding, is_changed and finding.kind == "import")
    _close(file, scripts.remaining(findings), len(scripts.remaining(left)), len(findings), is_changed)
    return len(scripts.remaining(left))


def _show(file: Path, finding: Finding, is_done: bool) -> None:
    state = "changed" if is_done else finding.kind
    rule = "" if finding.rule == finding.kind else f" ({finding.rule})"
    typer.echo(f"{file}:{finding.line}:{finding.column}: {state}{rule}: {finding.wrote}")
    typer.echo(f"    {finding.why}.")
    typer.echo(f"    {finding.way_out}")


def _close(file: Path, found: list[Finding], left: int, listed: int, was_written: bool) -> None:
    """Print the last line: what was found, or what was written and is left."""
    imports = sum(finding.kind == "import" for finding in found)
    if not listed:
        typer.echo(f"{file}: nothing to change.")
    elif was_written:
        typer.echo(f"{file}: written, {len(found) - left} settled, {left} left.")
    else:
        hint = "; --write changes the imports" if imports else ""
        typer.echo(f"{file}: imports to change: {imports}, others: {len(found) - imports}{hint}.")


def _complain(message: str) -> None:
    typer.echo(message, err=True)
