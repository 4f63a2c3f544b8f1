"""`laconic migrate`: what to change in a training script to move it from torch's modules to laconic's."""

from pathlib import Path
from typing import Annotated

import typer

from laconic.migration import Finding, ScriptError, check, read_script, remaining, rewrite
from laconic.migration import write as write_script


def migrate(
    files: Annotated[list[Path], typer.Argument(help="Training scripts.", show_default=False)],
    write: Annotated[bool, typer.Option("--write", help="Change the imports in the files, and nothing else.")] = False,
) -> None:
    """List the imports to change and the known misuses in training scripts; they are read, never run.

    Exit code 0: nothing to do. 1: findings are left (after --write: those that it does not change). 2: a file is
    missing or is not Python; the other files are still read.
    """
    outcomes = [_migrate_one(file, write) for file in files]
    raise typer.Exit(2 if None in outcomes else int(any(outcomes)))


def _migrate_one(file: Path, write: bool) -> int | None:
    """The number of findings left in a file; `None` if it could not be read or written."""
    try:
        script = read_script(file)
        findings = check(script)
        changed = rewrite(script) if write else script
        left = check(changed)
        if changed.text != script.text:
            write_script(changed)
    except FileNotFoundError:
        _complain(f"{file}: there is no such file. Give the path of a training script.")
        return None
    except OSError as error:
        _complain(f"{file}: {error.strerror or error}. It must be a file that can be read, and written for --write.")
        return None
    except ScriptError as error:
        _complain(str(error))
        return None
    for finding in findings:
        _show(file, finding, changed.text != script.text and finding.kind == "import")
    _close(file, findings, left, changed.text != script.text)
    return len(remaining(left))


def _show(file: Path, finding: Finding, is_done: bool) -> None:
    state = "changed" if is_done else finding.kind
    rule = "" if finding.rule == finding.kind else f" ({finding.rule})"
    typer.echo(f"{file}:{finding.line}:{finding.column}: {state}{rule}: {finding.wrote}")
    typer.echo(f"    {finding.why}.")
    typer.echo(f"    {finding.way_out}")


def _close(file: Path, findings: list[Finding], left: list[Finding], was_written: bool) -> None:
    if not findings:
        typer.echo(f"{file}: nothing to change.")
    elif was_written:
        done = len(remaining(findings)) - len(remaining(left))
        typer.echo(f"{file}: written, {done} settled, {len(remaining(left))} left.")
    else:
        imports = sum(finding.kind == "import" for finding in findings)
        others = len(remaining(findings)) - imports
        hint = "; --write changes the imports" if imports else ""
        typer.echo(f"{file}: imports to change: {imports}, others: {others}{hint}.")


def _complain(message: str) -> None:
    typer.echo(message, err=True)
