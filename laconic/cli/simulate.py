"""`laconic simulate`: many workers in one process, on a virtual clock."""

import json as json_format
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer

from laconic import plan as parse_plan
from laconic.cli import options
from laconic.cli.options import DEFAULT
from laconic.cli.output import console, table
from laconic.cli.view import PLAIN_LINES
from laconic.tools.errors import UsageError, check_count
from laconic.tools.lab.models import GPT, ResNet
from laconic.tools.lab.tasks import Lab, check_data
from laconic.tools.launch.links import link as parse_link
from laconic.tools.launch.workers import variables
from laconic.tools.planner.network import ComputedNetwork
from laconic.tools.planner.shapes import Shapes
from laconic.tools.simulate.clock import Conditions, TimeOnly
from laconic.tools.simulate.training import (
    SimulatedOutcome,
    SimulatedRun,
    SimulatedStep,
    SimulatedTask,
    Training,
    failures_of,
    lab_task,
    user_task,
)
from laconic.tools.units import DURATION, duration, human_bytes, parse, percent

_TIME = "The virtual clock"


def simulate(
    command: typer.Context,
    plan: Annotated[list[str] | None, typer.Option(help="A plan; repeat for more. Default: ddp().")] = None,
    workers: Annotated[int, typer.Option(help="Workers.")] = 64,
    steps: options.Steps = 100,
    step: Annotated[str, typer.Option(help="What a step computes for, such as 50ms.", rich_help_panel=_TIME)] = "50ms",
    jitter: Annotated[
        float, typer.Option(help="Standard deviation of a worker's step, relative to it.", rich_help_panel=_TIME)
    ] = 0.0,
    link: Annotated[
        str | None,
        typer.Option(help='200mbit, or "8 @ 300GB/s, 8 @ 1Gb/s". Default: no time.', rich_help_panel=_TIME),
    ] = None,
    latency: Annotated[
        str | None, typer.Option(help="Latency of a message, such as 0.2ms. Default: 0.", rich_help_panel=_TIME)
    ] = None,
    fail: Annotated[
        list[str] | None,
        typer.Option(help="5@300: worker 5 is lost when step 300 begins; repeat for more.", rich_help_panel=_TIME),
    ] = None,
    time_only: Annotated[
        bool, typer.Option("--time-only", help="Do not train: the clock alone.", rich_help_panel=_TIME)
    ] = False,
    model: Annotated[
        str,
        typer.Option(help="gpt, resnet, or module:function (docs/simulate.md).", rich_help_panel="The model"),
    ] = DEFAULT.model,
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
    network = _network(link, latency, workers)
    machine = network.link.levels[0].count if network is not None and len(network.link.levels) > 1 else None
    given = Conditions(parse(step, DURATION, "--step"), jitter, network, seed)
    if time_only:
        if fail:
            raise UsageError(f"--time-only --fail {fail[0]}: the clock alone knows no faults. Use one of them.")
        shapes = Shapes.of(_meta_model(settings, place))
        times = [TimeOnly(each, shapes, workers, given, machine).run(steps) for each in plans]
        if json:
            _print_json([asdict(each) | {"step_s": each.step_s, "utilisation": each.use.computing} for each in times])
            return
        rows = [
            (each.plan, duration(each.seconds), f"{each.step_s:.3g} s", human_bytes(each.sent_bytes / steps), each.use)
            for each in times
        ]
        title = f"{shapes.parameters:,} parameters, {workers:,} workers, {steps} steps, the clock alone"
        _print_table(title, ("time", "a step", "sent\na step"), rows)
        return
    failures = failures_of(fail or [], workers, steps)
    if place is None:
        check_data(settings)
    outcomes = []
    with variables({} if machine is None else {"LOCAL_WORLD_SIZE": str(machine)}):
        for each in plans:
            task = lab_task(settings) if place is None else user_task(place, seed)
            run = SimulatedRun(each, workers, steps, settings.lr, settings.bucket_mb, given, failures)
            outcomes.append(_train(run, task, quiet=json))
    if json:
        _print_json([each.as_json() for each in outcomes])
    else:
        _show(outcomes, network)


def _train(run: SimulatedRun, task: SimulatedTask, quiet: bool) -> SimulatedOutcome:
    """Train, and show about ten lines unless it is `quiet`."""
    training, steps, out = Training(run, task), [], console()
    stride = max(1, run.steps // PLAIN_LINES)
    for each in training.steps():
        steps.append(each)
        if not quiet and (each.step % stride == 0 or each.step in (1, run.steps)):
            loss, seconds, sent = _cells(each)
            line = f"{run.plan} step={each.step}/{run.steps} loss={loss} workers={len(each.losses)} time={seconds} "
            out.print(f"{line}sent={sent}", markup=False, soft_wrap=True)
    return training.outcome(steps)


def _network(text: str | None, latency: str | None, workers: int) -> ComputedNetwork | None:
    if text is None:
        return None
    return ComputedNetwork(parse_link(text, workers), 0.0 if latency is None else parse(latency, DURATION, "--latency"))


def _meta_model(settings: Lab, place: str | None) -> torch.nn.Module:
    with torch.device("meta"):
        if place is not None:
            return user_task(place, settings.seed).model
        if settings.model == "resnet":
            return ResNet(settings.layers, settings.width, settings.seed)
        return GPT(settings.layers, settings.width, settings.heads, settings.seed)


def _show(outcomes: Sequence[SimulatedOutcome], network: ComputedNetwork | None) -> None:
    first = outcomes[0]
    lost = "" if first.left == first.workers else f" ({first.left} left)"
    link = "" if network is None else f", link {network.link}"
    title = f"{first.parameters:,} parameters, {first.workers} workers{lost}, {first.last.step} steps{link}"
    rows = []
    for each in outcomes:
        loss, seconds, sent = _cells(each.last)
        valid = "-" if each.validation_loss is None else f"{each.validation_loss:.4f}"
        rows.append((each.plan, loss, valid, seconds, f"{each.step_s:.3g} s", sent, each.use))
    _print_table(title, ("loss", "validation", "time", "a step", "sent\nby each"), rows)


def _cells(step: SimulatedStep) -> tuple[str, str, str]:
    return f"{step.loss:.4f}", duration(step.seconds), human_bytes(step.sent_bytes)


def _print_table(title: str, headings: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
    """Print a line for each plan: its cells, and what its time was used for."""
    cells = [(*row, *map(percent, (use.computing, use.stragglers, use.link, use.faults))) for *row, use in rows]
    console().print(table(("plan", *headings, "computing", "stragglers", "link", "faults"), cells, title))


def _print_json(runs: list[dict[str, object]]) -> None:
    sys.stdout.write(json_format.dumps({"runs": runs}) + "\n")
