"""`laconic migrate`: what to change in a training script to move it from torch's modules to laconic's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laconic.atomic_write import write_atomically

if TYPE_CHECKING:
    from laconic.tools.migrate import ParsedScript


def migrate(
    files: Annotated[list[Path], typer.Argument(help="Training scripts.", show_default=False)],
    write: Annotated[bool, typer.Option("--write", help="Change the imports in the files, and nothing else.")] = False,
) -> None:
    """List the imports to change and the known misuses in training scripts; they are read, never run.

    Exit code 0: nothing to do. 1: findings are left (after --write: those that it does not change). 2: a file is
    missing or is not Python; the other files are still read.
    """
    raise typer.Exit(max(_migrate_one(file, write) for file in files))


def _migrate_one(file: Path, write: bool) -> int:
    """Return the exit code for one file."""
    try:
        from laconic.tools.migrate import ParsedScript  # LibCST is optional

        if file.suffix == ".ipynb":
            raise ValueError(
                f"{file}: a notebook is not a script. Export it: jupyter nbconvert --to script {file.name}"
            )
        script = ParsedScript(file.read_bytes(), str(file))
        changed = script.rewritten() if write else script.code
        left = len(ParsedScript(changed, str(file)).findings)
        if changed != script.code:
            write_atomically(file.resolve(), changed)  # a link stays one
    except FileNotFoundError:
        typer.echo(f"{file}: there is no such file. Give the path of a training script.", err=True)
        return 2
    except OSError as error:
        reason = error.strerror or error
        typer.echo(f"{file}: {reason}. It must be a file that can be read, and written for --write.", err=True)
        return 2
    except (ImportError, ValueError) as error:
        typer.echo(f"{error}", err=True)
        return 2
    _show(file, script, left, changed != script.code)
    return int(left > 0)


def _show(file: Path, script: ParsedScript, left: int, is_written: bool) -> None:
    for each in script.findings:
        kind = "changed" if is_written and each.kind == "import" else each.kind
        rule = "" if each.rule == each.kind else f" ({each.rule})"
        typer.echo(f"{file}:{each.line}:{each.column}: {kind}{rule}: {each.wrote}")
        typer.echo(f"    {each.why}.\n    {each.way_out}")
    imports = sum(each.kind == "import" for each in script.findings)
    hint = "; --write changes the imports" if imports else ""
    if not script.findings:
        typer.echo(f"{file}: nothing to change.")
    elif is_written:
        typer.echo(f"{file}: written, {len(script.findings) - left} settled, {left} left.")
    else:
        typer.echo(f"{file}: imports to change: {imports}, others: {len(script.findings) - imports}{hint}.")
