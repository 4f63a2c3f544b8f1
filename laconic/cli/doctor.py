"""`laconic doctor`: check a set-up before a run, or inject faults into a training."""

import json as json_text
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from laconic.atomic_write import write_atomically
from laconic.checks.outliers import names
from laconic.cli import options
from laconic.cli.results import check_writable
from laconic.cli.running import workers_here
from laconic.compare.files import versions
from laconic.compare.settings import LabError, check_workers, found_place, usable_cores
from laconic.doctor.diagnosis import check_as_worker, check_here, inject_faults
from laconic.doctor.finding import Finding, has_problem
from laconic.doctor.injection import FACTORY, Fault, InjectionError, check_faults, faults
from laconic.doctor.script_run import ScriptRun

COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}
DEFAULT_LIMIT_S = 300.0
DEFAULT_TIMEOUT_S = 60.0


def doctor(
    arguments: Annotated[
        list[str] | None, typer.Argument(help="After --: arguments of the script.", show_default=False)
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(
            help="Also run this script on all workers, up to the end of its laconic.attach.", show_default=False
        ),
    ] = None,
    inject: Annotated[
        list[str] | None,
        typer.Option(
            "--inject",
            help="Run the script with a fault instead, and show how each worker ends: kill:2@300 (worker 2, step "
            "300), stop:1@100, stop:1@100:5s, nan:0@50, flip:3@70, slow:1@20:2s. Repeat for more.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Also check that this file or folder is the same on all workers.", show_default=False),
    ] = None,
    workers: options.Workers = None,
    seconds: Annotated[float, typer.Option(help="Time limit of the script.")] = DEFAULT_LIMIT_S,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for other workers.")] = DEFAULT_TIMEOUT_S,
    json: options.Json = None,
    plain: options.Plain = False,
) -> None:
    """Check this machine, or all workers under torchrun, before a run. Shows what is wrong and what to do.

    Exit code 0: no problem (there may be warnings). 1: a problem. 2: wrong usage.
    """
    if json is not None:
        check_writable(json)
    if not timeout > 0:
        raise LabError(f"--timeout {timeout:g}: it must be a number above 0. Leave it out for the default.")
    wanted = _faults(inject or [])
    run = _script_run(script, tuple(arguments or ()), workers, seconds, wanted)
    shows = True
    if found_place(os.environ) is not None:
        findings, shows = check_as_worker(data, run, timeout)
    elif run is not None and wanted:
        findings = inject_faults(run)
    else:
        findings = check_here(data, run)
    if shows:
        show(findings, plain or not sys.stdout.isatty())
        if json is not None:
            write_atomically(json, _as_json(findings).encode())
    raise typer.Exit(int(has_problem(findings)))


def _faults(texts: Sequence[str]) -> tuple[Fault, ...]:
    try:
        wanted = tuple(fault for text in texts for fault in faults(text))
    except InjectionError as error:
        raise LabError(f"--inject {error}") from None
    if wanted and found_place(os.environ) is not None:
        raise LabError(
            f"--inject {wanted[0]}: torchrun has already started the workers, and this option starts them itself. "
            f"Run laconic without torchrun, or set LACONIC_INJECT and LACONIC_OBSERVERS={FACTORY} for your own run."
        )
    return wanted


def _script_run(
    script: Path | None, arguments: tuple[str, ...], workers: int | None, limit_s: float, wanted: tuple[Fault, ...]
) -> ScriptRun | None:
    if script is None:
        if arguments:
            raise LabError(f"-- {' '.join(arguments)}: these are for a script. Give one with --script train.py.")
        if wanted:
            raise LabError(f"--inject {wanted[0]}: a fault needs a training. Give one with --script train.py.")
        return None
    run = ScriptRun(script, arguments, workers_here(workers), limit_s, wanted)
    if found_place(os.environ) is None:
        check_workers(run.workers, usable_cores())
    try:
        check_faults(wanted, run.workers)
    except InjectionError as error:
        raise LabError(f"--inject {error}") from None
    return run


def show(findings: Sequence[Finding], plain: bool) -> None:
    """Print the findings as lines or as a table, and a summary."""
    if plain:
        for each in findings:
            typer.echo(f"{each.verdict}: {_title(each)}: {each.found}")
            if each.way_out:
                typer.echo(f"    {each.why}\n    {each.way_out}")
    else:
        Console().print(_table(findings))
    typer.echo(summary(findings))


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for each in findings:
        verdict = f"[{COLOURS[each.verdict]}]{each.verdict}[/]"
        table.add_row(verdict, escape(_title(each)), escape(each.found), escape(f"{each.why} {each.way_out}".strip()))
    return table


def _title(finding: Finding) -> str:
    return finding.name + (f" ({names(finding.workers)})" if finding.workers else "")


def summary(findings: Sequence[Finding]) -> str:
    """The last line: how many problems and warnings.

    >>> summary([])
    'no problem, no warning.'
    """
    counts = {verdict: sum(each.verdict == verdict for each in findings) for verdict in ("problem", "warning")}
    return ", ".join(f"{count or 'no'} {verdict}{'s' * (count > 1)}" for verdict, count in counts.items()) + "."


def _as_json(findings: Sequence[Finding]) -> str:
    fields = {"ok": not has_problem(findings), "findings": [asdict(each) for each in findings], "versions": versions()}
    return json_text.dumps(fields, indent=1) + "\n"
