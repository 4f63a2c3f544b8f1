"""`laconic probe`: measure a network, the codecs and a training step, before a plan is chosen."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console

from laconic import plan as parse_plan
from laconic.cli import options
from laconic.cli.output import check_writable, console, table
from laconic.tools.errors import UsageError
from laconic.tools.launch.links import Link, NoSlowLink, slow_link
from laconic.tools.launch.output import following, worker_file
from laconic.tools.launch.workers import (
    WorkerNetwork,
    check_workers,
    found_place,
    python,
    run_folder,
    run_workers,
    workers_here,
)
from laconic.tools.machine import usable_cores
from laconic.tools.planner.network import fit
from laconic.tools.planner.predict import PLANS
from laconic.tools.planner.probe import ProbeOptions, process_group, run_probe
from laconic.tools.planner.probe_data import OPS, Probe
from laconic.tools.units import duration, human_bytes, rate_text

COLLECTIVES = ("level", "collective", "latency\na hop", "bandwidth", "largest", "took", "spread")

_option = partial(typer.Option, show_default=False)
_MODEL = (
    "module:function, which returns a model, or a model and a function that computes the loss of its next batch. "
    "Default: the lab's GPT."
)
_PLANS = f"Also measure the codec of this plan; repeat for more. Always: {', '.join(map(repr, PLANS))}."
_GROUPS = (
    "Also measure collectives inside groups of this many neighbouring workers; repeat for more. laconic plan takes the "
    "largest for workers that share a link to the others."
)


def probe(
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("probe.json"),
    workers: options.Workers = None,
    link: options.LinkText = None,
    groups: Annotated[list[int] | None, _option("--groups", help=_GROUPS)] = None,
    plan: Annotated[list[str] | None, _option("--plan", help=_PLANS)] = None,
    model: Annotated[str | None, _option("--model", help=_MODEL)] = None,
    longest: Annotated[
        float, typer.Option(help="Seconds of the longest collective. Sizes grow up to it.")
    ] = ProbeOptions.longest_s,
) -> None:
    """Measure collectives, codecs and a training step, in about a minute.

    Runs as a worker under torchrun, or starts --workers processes here, with --link on hosts of their own.
    """
    connected = options.link_of(link, workers)
    count = workers_here(workers if connected is None else connected.workers)
    chosen = ProbeOptions(model, tuple(map(parse_plan, plan or ())), groups=tuple(groups or ()), longest_s=longest)
    chosen.check(count)
    check_writable(out, "--out")
    if link is not None:
        options.refuse_under_torchrun("--link")
    place = found_place(os.environ)
    if place is None:
        check_workers(count, usable_cores())
        found = _launched(chosen, count, connected)
    else:
        with process_group(), _progress() as show:
            found = run_probe(chosen, lambda done, text: show(f"{done:4.0%} {text}") if place.worker == 0 else None)
    if place is None or place.worker == 0:
        found.write(out)
        print_summary(found)
        typer.echo(f"written to {out}")


def _launched(chosen: ProbeOptions, workers: int, link: Link | None) -> Probe:
    """Start workers, on hosts of their own if there is a link, each of which runs this command."""
    given = [f"--longest={chosen.longest_s}", *(f"--groups={size}" for size in chosen.groups)]
    given += [f"--plan={plan!r}" for plan in chosen.plans] + (
        [] if chosen.model is None else [f"--model={chosen.model}"]
    )
    try:
        with run_folder() as folder, nullcontext() if link is None else slow_link(link) as slow, _progress() as show:
            out, stderr = folder / "probe.json", worker_file(folder, 0)
            with following(stderr, lambda line: show(line) if re.match(r" *\d+% ", line) else None):
                command = python("-m", "laconic", "probe", f"--out={out}", *given)
                network = WorkerNetwork(slow)
                run_workers(command, workers, folder, network, title="the probe", has_ended=lambda worker: out.exists())
            return replace(Probe.read(out), link=None if link is None else str(link))
    except NoSlowLink as error:
        raise UsageError(
            f"--link {link}: no real link can be made here ({error}), and a probe measures only real ones. "
            'Leave out --link, or describe the link to laconic plan: --link "100mbit".'
        ) from None


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show on stderr what is measured: in one line of a terminal, elsewhere a line for each stage."""
    if sys.stderr.isatty():
        with Console(stderr=True).status("starting workers") as status:
            yield status.update
    else:
        yield partial(print, file=sys.stderr, flush=True)


def print_summary(probe: Probe) -> None:
    """Print what was measured: collectives by level, codecs and the step."""
    out = console(plain=True)
    hosts = len(probe.hosts)
    link = "" if probe.link is None else f", link {probe.link}"
    out.print(
        f"{probe.workers} worker{'s' * (probe.workers > 1)} on {hosts} host{'s' * (hosts > 1)}, {probe.backend}, "
        f"computing on {probe.device} with {probe.threads} thread{'s' * (probe.threads > 1)}{link}"
    )
    rows = []
    for level, workers in probe.levels.items():
        for op in OPS:
            measured = probe.of(op, level)
            found, largest = fit(measured), max(measured, key=lambda each: each.bytes)
            cells = (
                duration(found.latency_s),
                f"{rate_text(found.bandwidth_bps, digits=3)}/s",
                human_bytes(largest.bytes),
                duration(largest.seconds),
                f"{largest.spread:.0%}",
            )
            rows.append((f"{level} ({workers})", op, *cells))
    if rows:
        out.print(table(COLLECTIVES, rows, left=("collective",)))
    if probe.codecs:
        size = f"{probe.model.parameters:,} parameters of {probe.model.name}"
        out.print(f"own computation to average {size} once, without the network")
        codecs = [(each.plan, duration(each.seconds), f"{each.spread:.0%}") for each in probe.codecs]
        out.print(table(("plan", "seconds", "spread"), codecs))
    out.print(_step(probe))


def _step(probe: Probe) -> str:
    step = probe.step
    if step is None:
        return "step: not measured. Let --model return a model and a function of its loss, or give laconic plan --step."
    parts = {"forward": step.forward_s, "backward": step.backward_s, "optimizer": step.optimizer_s}
    shown = ", ".join(f"{name} {duration(median(samples))}" for name, samples in parts.items())
    return f"step without synchronising: {duration(step.seconds)} ({shown})"
