"""`laconic probe`: measure a network, the codecs and a training step, before a plan is chosen."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
from laconic.plans.methods import alone
from laconic.tools.compare.runs import Script, TrainingRun
from laconic.tools.errors import UsageError, check_script
from laconic.tools.launch.links import Link, NoSlowLink, slow_link
from laconic.tools.launch.workers import WorkerNetwork, check_workers, found_place, workers_here
from laconic.tools.machine import usable_cores
from laconic.tools.planner.network import fit
from laconic.tools.planner.predict import PLANS
from laconic.tools.planner.probe import ProbeOptions, Show, launch_probe, process_group, run_probe, script_step
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
_SCRIPT = "Take the step time from this script, run with plan alone(). It attaches plan_from_env() and reports."


def probe(
    arguments: Annotated[
        list[str] | None, typer.Argument(help="After --: arguments of --step-script.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("probe.json"),
    workers: options.Workers = None,
    link: options.LinkText = None,
    groups: Annotated[list[int] | None, _option("--groups", help=_GROUPS)] = None,
    plan: Annotated[list[str] | None, _option("--plan", help=_PLANS)] = None,
    model: Annotated[str | None, _option("--model", help=_MODEL)] = None,
    step_script: Annotated[Path | None, _option("--step-script", help=_SCRIPT)] = None,
    longest: Annotated[
        float, typer.Option(help="Seconds of the longest collective. Sizes grow up to it.")
    ] = ProbeOptions.longest_s,
) -> None:
    """Measure collectives, codecs and a training step, in about a minute.

    Runs as a worker under torchrun, or starts --workers processes here, with --link on hosts of their own.
    """
    connected = options.link_of(link, workers)
    count = workers_here(workers if connected is None else connected.workers)
    chosen = ProbeOptions(
        model=model,
        plans=tuple(map(parse_plan, plan or ())),
        groups=tuple(groups or ()),
        longest_s=longest,
        link=None if connected is None else str(connected),
    )
    chosen.check(count)
    check_writable(out, "--out")
    given = options.script_arguments(arguments, step_script, "--step-script")
    if step_script is not None:
        check_script(step_script, "--step-script")
    if link or step_script:
        options.refuse_under_torchrun("--link" if link else "--step-script")
    place = found_place(os.environ)
    if place is None:
        check_workers(count, usable_cores())
        script = None if step_script is None else TrainingRun(alone(), Script(step_script, given), count)
        found = _launched(chosen, count, connected, script)
    else:
        with process_group(), _progress(shown=place.worker == 0) as show:
            found = run_probe(chosen, show)
    if place is None or place.worker == 0:
        found.write(out)
        print_summary(found)
        typer.echo(f"written to {out}")


def _launched(chosen: ProbeOptions, workers: int, link: Link | None, script: TrainingRun | None) -> Probe:
    try:
        with ExitStack() as stack:
            network = WorkerNetwork(slow=None if link is None else stack.enter_context(slow_link(link)))
            show = stack.enter_context(_progress())
            found = launch_probe(chosen, workers, network, show)
            if script is None:
                return found
            show(1.0, f"steps of {script.training.name}")
            return replace(found, step=script_step(script, network))
    except NoSlowLink as error:
        raise UsageError(
            f"--link {link}: no real link can be made here ({error}), and a probe measures only real ones. "
            'Leave out --link, or describe the link to laconic plan: --link "100mbit".'
        ) from None


@contextmanager
def _progress(shown: bool = True) -> Iterator[Show]:
    """Show on stderr what is measured: in one line of a terminal, elsewhere a line for each stage."""
    if not shown or not sys.stderr.isatty():
        yield lambda done, text: print(f"{done:4.0%} {text}", file=sys.stderr, flush=True) if shown else None
        return
    with Console(stderr=True).status("starting workers") as status:
        yield lambda done, text: status.update(f"{done:4.0%} {text}")


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
        return "step: not measured. Let --model return a model and a function of its loss, or use --step-script."
    text = f"step without synchronising: {duration(step.seconds)}"
    if not step.forward_s:
        return text
    names = (("forward", step.forward_s), ("backward", step.backward_s), ("optimizer", step.optimizer_s))
    return f"{text} ({', '.join(f'{name} {duration(median(samples))}' for name, samples in names)})"
