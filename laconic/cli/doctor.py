"""`laconic doctor`: check a set-up before a run, or inject faults into a training."""

import json as json_text
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from laconic.atomic_write import write_atomically
from laconic.cli import options
from laconic.cli.output import check_writable, console, table
from laconic.errors import names
from laconic.tools.doctor.checks import Finding, has_problem
from laconic.tools.doctor.diagnosis import check_as_worker, check_here
from laconic.tools.doctor.injection import FACTORY, faults
from laconic.tools.doctor.script import ScriptRun, inject_faults
from laconic.tools.errors import UsageError, check_count, check_positive
from laconic.tools.launch.workers import check_workers, found_place, workers_here
from laconic.tools.machine import usable_cores, versions

HEADINGS = ("", "check", "found", "what to do")
COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}
_option = partial(typer.Option, show_default=False)
_INJECT = (
    "Run the script with a fault instead, and show how each worker ends: kill:2@300 (worker 2, step 300), stop:1@100, "
    "stop:1@100:5s, nan:0@50, flip:3@70, slow:1@20:2s. Repeat for more."
)
Arguments = Annotated[list[str] | None, typer.Argument(help="After --: arguments of the script.", show_default=False)]
Script = Annotated[
    Path | None, _option(help="Also run this script on all workers, up to the end of its laconic.attach.")
]
Inject = Annotated[list[str] | None, _option("--inject", help=_INJECT)]
Data = Annotated[Path | None, _option(help="Also check that this file or folder is the same on all workers.")]
Seconds = Annotated[float, typer.Option(help="Time limit of the script.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for other workers.")]


def doctor(
    arguments: Arguments = None,
    script: Script = None,
    inject: Inject = None,
    data: Data = None,
    workers: options.Workers = None,
    seconds: Seconds = 300.0,
    timeout: Timeout = 60.0,
    json: options.Json = None,
    plain: options.Plain = False,
) -> None:
    """Check this machine, or all workers under torchrun, before a run. Shows what is wrong and what to do.

    Exit code 0: no problem (there may be warnings). 1: a problem. 2: wrong usage.
    """
    if json is not None:
        check_writable(json)
    check_positive("timeout", timeout)
    check_positive("seconds", seconds)
    check_count("workers", workers)
    run = _script_run(script, arguments, workers, seconds, inject or [])
    shows = True
    if found_place(os.environ) is not None:
        findings, shows = check_as_worker(data, run, timeout)
    elif run is not None and run.faults:
        findings = inject_faults(run)
    else:
        findings = check_here(data, run)
    if shows:
        show(findings, plain or not sys.stdout.isatty())
        if json is not None:
            shown = [asdict(each) for each in findings]
            fields = {"ok": not has_problem(findings), "findings": shown, "versions": versions()}
            write_atomically(json, (json_text.dumps(fields, indent=1) + "\n").encode())
    raise typer.Exit(int(has_problem(findings)))


def _script_run(
    script: Path | None, arguments: list[str] | None, workers: int | None, limit_s: float, inject: list[str]
) -> ScriptRun | None:
    try:
        wanted = faults(",".join(inject))
    except ValueError as error:
        raise UsageError(f"--inject {error}") from None
    under_launcher = found_place(os.environ) is not None
    if wanted:
        its_own = f", or set LACONIC_INJECT and LACONIC_OBSERVERS={FACTORY} for your own run"
        options.refuse_under_torchrun(f"--inject {wanted[0]}", its_own)
    if script is None and wanted:
        raise UsageError(f"--inject {wanted[0]}: a fault needs a training. Give one with --script train.py.")
    given = options.script_arguments(arguments, script)
    if script is None:
        return None
    run = ScriptRun(script, given, workers_here(workers), limit_s, wanted)
    if not under_launcher:
        check_workers(run.workers, usable_cores())
    return run


def show(findings: Sequence[Finding], plain: bool) -> None:
    """Print the findings as lines or as a table, and a summary."""
    rows = []
    for each in findings:
        title = each.name + (f" ({names(each.workers)})" if each.workers else "")
        if plain:
            typer.echo(f"{each.severity}: {title}: {each.found}")
            if each.way_out:
                typer.echo(f"    {each.why}\n    {each.way_out}")
        rows.append(
            (Text(each.severity, COLOURS[each.severity]), title, each.found, f"{each.why} {each.way_out}".strip())
        )
    if not plain:
        console().print(table(HEADINGS, rows, left=HEADINGS))
    typer.echo(summary(findings))


def summary(findings: Sequence[Finding]) -> str:
    """The last line: how many problems and warnings.

    >>> summary([])
    'no problem, no warning.'
    """
    counts = {severity: sum(each.severity == severity for each in findings) for severity in ("problem", "warning")}
    return ", ".join(f"{count or 'no'} {severity}{'s' * (count > 1)}" for severity, count in counts.items()) + "."
