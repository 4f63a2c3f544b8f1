"""`laconic doctor`: what is wrong with a set-up, and what to do about it, before a run; and faults on purpose."""

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

from laconic.checks.outliers import names
from laconic.cli import options
from laconic.cli.results import check_writable
from laconic.cli.running import workers_here
from laconic.compare.files import versions, write_whole
from laconic.compare.settings import LabError, check_workers, found_place, usable_cores
from laconic.doctor.diagnosis import Asked, alone, among_workers, inject
from laconic.doctor.finding import Finding, has_problem
from laconic.doctor.injection import Fault, InjectionError, check_faults, faults
from laconic.doctor.visit import Visit

COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}
DEFAULT_SECONDS = 300.0
DEFAULT_PATIENCE_S = 60.0


def doctor(
    arguments: Annotated[
        list[str] | None, typer.Argument(help="After --: what the script is given.", show_default=False)
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(
            help="Also run this script, on all workers, up to the end of its laconic.session.session.", show_default=False
        ),
    ] = None,
    inject_faults: Annotated[
        list[str] | None,
        typer.Option(
            "--inject",
            help="Run the script with a fault instead, and show what each worker says: kill:2@300 (worker 2, step "
            "300), stop:1@100, stop:1@100:5s, nan:0@50, flip:3@70, slow:1@20:2s. Repeat for more.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Also see whether this file or folder is the same on all workers.", show_default=False),
    ] = None,
    workers: options.Workers = None,
    seconds: Annotated[float, typer.Option(help="How long the script may run.")] = DEFAULT_SECONDS,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for other workers.")] = DEFAULT_PATIENCE_S,
    json: options.Json = None,
    plain: options.Plain = False,
) -> None:
    """Check this machine, or all workers under torchrun, before a run. Says what is wrong and what to do.

    Exit code 0: no problem (there may be warnings). 1: a problem. 2: the command was not understood.
    """
    if json is not None:
        check_writable(json)
    if not timeout > 0:
        raise LabError(f"--timeout {timeout:g}: it must be a number above 0. Leave it out for the default.")
    wanted = _faults(inject_faults or [])
    visit = _visit(script, tuple(arguments or ()), workers, seconds, wanted)
    asked = Asked(data, visit, timeout)
    speaks = True
    if found_place(os.environ) is not None:
        findings, speaks = among_workers(asked)
    elif visit is not None and wanted:
        findings = inject(visit)
    else:
        findings = alone(asked)
    if speaks:
        _show(findings, plain)
        if json is not None:
            write_whole(json, _as_json(findings).encode())
    raise typer.Exit(int(has_problem(findings)))


def _faults(texts: Sequence[str]) -> tuple[Fault, ...]:
    try:
        wanted = tuple(fault for text in texts for fault in faults(text))
    except InjectionError as error:
        raise LabError(f"--inject {error}") from None
    if wanted and found_place(os.environ) is not None:
        raise LabError(
            f"--inject {wanted[0]}: torchrun has already started the workers, and this option starts them itself. "
            "Run laconic without torchrun, or set LACONIC_INJECT for your own run."
        )
    return wanted


def _visit(
    script: Path | None, arguments: tuple[str, ...], workers: int | None, seconds: float, wanted: tuple[Fault, ...]
) -> Visit | None:
    if script is None:
        if arguments:
            raise LabError(f"-- {' '.join(arguments)}: these are for a script. Give one with --script train.py.")
        if wanted:
            raise LabError(f"--inject {wanted[0]}: faults need a training. Give one with --script train.py.")
        return None
    visit = Visit(script, arguments, workers_here(workers), seconds, wanted)
    if found_place(os.environ) is None:
        check_workers(visit.workers, usable_cores())
    try:
        check_faults(wanted, visit.workers)
    except InjectionError as error:
        raise LabError(f"--inject {error}") from None
    return visit


def _show(findings: Sequence[Finding], plain: bool) -> None:
    if sys.stdout.isatty() and not plain:
        Console().print(_table(findings))
    else:
        for finding in findings:
            typer.echo(f"{finding.verdict}: {_named(finding)}: {finding.found}")
            if finding.way_out:
                typer.echo(f"    {finding.way_out}")
    typer.echo(summary(findings))


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for each in findings:
        verdict = f"[{COLOURS[each.verdict]}]{each.verdict}[/]"
        table.add_row(verdict, escape(_named(each)), escape(each.found), escape(each.way_out))
    return table


def _named(finding: Finding) -> str:
    return finding.name + (f" ({names(finding.workers)})" if finding.workers else "")


def summary(findings: Sequence[Finding]) -> str:
    """The last line: how many problems and warnings.

    >>> summary([])
    'no problem, no warning.'
    """
    counts = {verdict: sum(each.verdict == verdict for each in findings) for verdict in ("problem", "warning")}
    return ", ".join(f"{count or 'no'} {verdict}{'s' * (count > 1)}" for verdict, count in counts.items()) + "."


def _as_json(findings: Sequence[Finding]) -> str:
    told = {"ok": not has_problem(findings), "findings": [asdict(each) for each in findings], "versions": versions()}
    return json_text.dumps(told, indent=1) + "\n"
