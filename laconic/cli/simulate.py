"""`laconic simulate`: many workers in one process, on a virtual clock."""

import json as json_format
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import torch
import typer

from laconic import plan as parse_plan
from laconic.cli import options
from laconic.cli.options import DEFAULT
from laconic.cli.output import console, table
from laconic.cli.view import PLAIN_LINES
from laconic.tools.errors import UsageError, check_count
from laconic.tools.lab.tasks import check_data, make_model
from laconic.tools.launch.workers import variables
from laconic.tools.planner.network import computed_network
from laconic.tools.planner.shapes import Shapes
from laconic.tools.simulate.clock import NO_TIME, Conditions, SimulatedOutcome, TimeOnly
from laconic.tools.simulate.training import (
    SimulatedRun,
    SimulatedTask,
    Training,
    failures_of,
    lab_task,
    user_task,
)
from laconic.tools.units import DURATION, duration, human_bytes, parse, percent

_time = partial(typer.Option, rich_help_panel="The virtual clock")
_JITTER = "Standard deviation of a worker's step, relative to it."
_LINK = '200mbit, or "8 @ 300GB/s, 8 @ 1Gb/s". Default: no time.'
_FAIL = "5@300: worker 5 is lost when step 300 begins; repeat for more."
_MODEL = typer.Option(help="gpt, resnet, or module:function (docs/simulate.md).", rich_help_panel="The model")


def simulate(
    command: typer.Context,
    plan: Annotated[list[str] | None, typer.Option(help="A plan; repeat for more. Default: ddp().")] = None,
    workers: Annotated[int, typer.Option(help="Workers.")] = 64,
    steps: options.Steps = 100,
    step: Annotated[str, _time(help="What a step computes for, such as 50ms.")] = "50ms",
    jitter: Annotated[float, _time(help=_JITTER)] = 0.0,
    link: Annotated[str | None, _time(help=_LINK)] = None,
    latency: Annotated[str | None, _time(help="Latency of a message, such as 0.2ms. Default: 0.")] = None,
    fail: Annotated[list[str] | None, _time(help=_FAIL)] = None,
    time_only: Annotated[bool, _time("--time-only", help="Do not train: the clock alone.")] = False,
    model: Annotated[str, _MODEL] = DEFAULT.model,
    layers: options.Layers = DEFAULT.layers,
    width: options.Width = DEFAULT.width,
    seed: options.Seed = DEFAULT.seed,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every step.")] = False,
) -> None:
    """Train with many workers in this process, or only count the time that they would take.

    Codecs, schedules and outer steps are the real ones. Losses are those of real processes, bit for bit.
    """
    check_count("workers", workers)
    plans = [parse_plan(text) for text in plan or ["ddp()"]]
    place = model if ":" in model else None
    settings = options.lab_settings(command, model=DEFAULT.model if place else model)
    network = NO_TIME if link is None else computed_network(link, latency, workers)
    machine = network.link.machine
    given = Conditions(parse(step, DURATION, "--step"), jitter, network, seed)
    outcomes = []
    if time_only:
        if fail:
            raise UsageError(f"--time-only --fail {fail[0]}: the clock alone knows no faults. Use one of them.")
        with torch.device("meta"):
            shapes = Shapes.of(make_model(settings) if place is None else user_task(place, seed).model)
        outcomes = [TimeOnly(each, shapes, workers, given, machine).run(steps) for each in plans]
    else:
        failures = failures_of(fail or [], workers, steps)
        if place is None:
            check_data(settings)
        with variables({} if machine is None else {"LOCAL_WORLD_SIZE": str(machine)}):
            for each in plans:
                task = lab_task(settings) if place is None else user_task(place, seed)
                run = SimulatedRun(each, workers, steps, settings.lr, settings.bucket_mb, given, failures)
                outcomes.append(_train(run, task, quiet=json))
    if json:
        sys.stdout.write(json_format.dumps({"runs": [each.as_json() for each in outcomes]}) + "\n")
    else:
        _show(outcomes, "" if link is None else f", link {network.link}")


def _train(run: SimulatedRun, task: SimulatedTask, quiet: bool) -> SimulatedOutcome:
    """Train, and show about ten lines unless it is `quiet`."""
    training, steps, out = Training(run, task), [], console()
    stride = max(1, run.steps // PLAIN_LINES)
    for each in training.steps():
        steps.append(each)
        if not quiet and (each.step % stride == 0 or each.step in (1, run.steps)):
            line = f"{run.plan} step={each.step}/{run.steps} loss={each.loss:.4f} workers={len(each.losses)} "
            line += f"time={duration(each.seconds)} sent={human_bytes(each.sent_bytes)}"
            out.print(line, markup=False, soft_wrap=True)
    return training.outcome(steps)


def _show(outcomes: Sequence[SimulatedOutcome], link: str) -> None:
    """Print a line for each plan: its losses if it trained, its time, and what the time was used for."""
    first = outcomes[0]
    lost = "" if first.left == first.workers else f" ({first.left} left)"
    title = f"{first.parameters:,} parameters, {first.workers:,} workers{lost}, {first.steps} steps{link}"
    rows = []
    for each in outcomes:
        valid = "-" if each.validation_loss is None else f"{each.validation_loss:.4f}"
        losses = [f"{each.curve[-1].loss:.4f}", valid] if each.curve else []
        times = [duration(each.seconds), f"{each.step_s:.3g} s", human_bytes(each.sent_bytes)]
        use = map(percent, (each.use.computing, each.use.stragglers, each.use.link, each.use.faults))
        rows.append((each.plan, *losses, *times, *use))
    headings = ("plan", *(("loss", "validation") if first.curve else ()), "time", "a step", "sent\nby each")
    console().print(table((*headings, "computing", "stragglers", "link", "faults"), rows, title))
