"""`laconic probe`: measure a network, the codecs and a training step, before a plan is chosen."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from laconic.cli import options
from laconic.cli.compare import link_of, workers_of
from laconic.cli.options import DEFAULT
from laconic.cli.probe_summary import print_summary
from laconic.cli.results import check_writable
from laconic.plans.methods import alone
from laconic.tools.compare.runs import Run, Script
from laconic.tools.errors import UsageError
from laconic.tools.lab.settings import MODELS, STEPS
from laconic.tools.launch.links import Link
from laconic.tools.launch.slow_link import NoSlowLink, slow_link
from laconic.tools.launch.workers import Network, check_workers, found_place, workers_here
from laconic.tools.machine import usable_cores
from laconic.tools.planner.front import PLANS
from laconic.tools.planner.probe import ProbeOptions, Show, process_group, run_probe
from laconic.tools.planner.probe_data import Probe
from laconic.tools.planner.probe_launch import launch_probe, script_step

_option = partial(typer.Option, show_default=False)
_MODEL = (
    "gpt or resnet of the lab; or module:function, which returns a model, or a model and a function that computes the "
    "loss of its next batch."
)
_PLANS = f"Also measure the codec of this plan; repeat for more. Always: {', '.join(PLANS)}."
_GROUPS = "Also measure collectives inside groups of this many neighbouring workers; repeat for more."
_SCRIPT = "Take the step time from this script, run with plan alone(). It attaches plan_from_env() and reports."
Out = Annotated[Path, typer.Option("--out", help="The file to write.", rich_help_panel="Output")]
Arguments = Annotated[
    list[str] | None, typer.Argument(help="After --: arguments of --step-script.", show_default=False)
]
Groups = Annotated[list[int] | None, _option("--groups", help=_GROUPS)]
Plans = Annotated[list[str] | None, _option("--plan", help=_PLANS)]
Model = Annotated[str, typer.Option("--model", help=_MODEL, rich_help_panel="The model")]
StepScript = Annotated[Path | None, _option("--step-script", help=_SCRIPT)]
Device = Annotated[str, typer.Option(help="Where models compute: cpu, cuda, or auto for cuda where there is one.")]
Longest = Annotated[float, typer.Option(help="Seconds of the longest collective. Sizes grow up to it.")]


def probe(
    command: typer.Context,
    arguments: Arguments = None,
    out: Out = Path("probe.json"),
    workers: options.Workers = None,
    link: options.LinkText = None,
    hosts: options.HostCount = None,
    groups: Groups = None,
    plan: Plans = None,
    model: Model = DEFAULT.model,
    layers: options.Layers = DEFAULT.layers,
    width: options.Width = DEFAULT.width,
    context: options.Context = DEFAULT.context,
    batch: options.Batch = DEFAULT.batch,
    data: options.Data = None,
    step_script: StepScript = None,
    device: Device = "auto",
    longest: Longest = 0.5,
    plain: options.Plain = False,
) -> None:
    """Measure collectives, links between hosts, codecs, memory and a training step, in about a minute.

    Runs as a worker under torchrun, or starts --workers processes here, with --link on hosts of their own.
    """
    given = workers_of(hosts, workers, link)
    connected = link_of(link, given)
    count = workers_here(given if connected is None else connected.workers)
    in_lab = model in MODELS or ":" not in model
    lab = options.lab_settings(command, model=model if in_lab else DEFAULT.model)
    chosen = ProbeOptions(
        lab=tuple(lab.arguments(STEPS)),
        model=None if in_lab else model,
        plans=tuple(plan or ()),
        groups=tuple(groups or ()),
        device=device,
        longest_s=longest,
        link=None if connected is None else str(connected),
    )
    chosen.check(count)
    check_writable(out, "--out")
    script = _script(step_script, tuple(arguments or ()), count)
    if found_place(os.environ) is not None:
        found = _as_worker(chosen, plain, "--link" if link else "--step-script" if script else None)
    else:
        check_workers(count, usable_cores())
        found = _launched(chosen, count, connected, script, plain)
    if found is not None:
        found.write(out)
        print_summary(found)
        typer.echo(f"written to {out}")


def _script(script: Path | None, arguments: tuple[str, ...], workers: int) -> Run | None:
    if script is None and arguments:
        raise UsageError(f"-- {' '.join(arguments)}: these are for a script. Give one with --step-script train.py.")
    if script is not None and not script.is_file():
        raise UsageError(f"--step-script {script}: there is no such file. Give the path of a training script.")
    return None if script is None else Run(alone(), Script(script, arguments), workers)


def _as_worker(chosen: ProbeOptions, plain: bool, refused: str | None) -> Probe | None:
    """Measure in this process, which is a worker of torchrun's. Only worker 0 has a result to show."""
    if refused is not None:
        raise UsageError(
            f"{refused}: torchrun has already started the workers, and this option starts them itself. "
            "Run laconic without torchrun."
        )
    place = found_place(os.environ)
    first = place is not None and place.worker == 0
    with process_group(chosen.device), _progress(plain, shown=first) as show:
        found = run_probe(chosen, show)
    return found if first else None


def _launched(chosen: ProbeOptions, workers: int, link: Link | None, script: Run | None, plain: bool) -> Probe:
    try:
        with _network(link) as network, _progress(plain) as show:
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
def _network(link: Link | None) -> Iterator[Network]:
    if link is None:
        yield Network()
        return
    with slow_link(link) as slow:
        yield Network(slow=slow)


@contextmanager
def _progress(plain: bool, shown: bool = True) -> Iterator[Show]:
    """Show a bar on stderr, or a line for each stage if that is not a terminal."""
    if plain or not shown or not sys.stderr.isatty():
        last = ""

        def show_line(done: float, text: str) -> None:
            nonlocal last
            if shown and text != last:
                print(f"{done:4.0%} {text}", file=sys.stderr, flush=True)
            last = text

        yield show_line
        return
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting workers", total=1.0)
        yield lambda done, text: bar.update(task, completed=done, description=text)
