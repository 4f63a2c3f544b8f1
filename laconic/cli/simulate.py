"""`laconic simulate`: many workers in one process, on a virtual clock."""

import json as json_format
import sys
from dataclasses import asdict
from typing import Annotated

import torch
import typer

from laconic import plan as parse_plan
from laconic.cli import options
from laconic.cli.options import DEFAULT
from laconic.cli.simulation import SimulationView, time_table
from laconic.cost import meta
from laconic.tools.errors import UsageError, check_count
from laconic.tools.lab.models import GPT, ResNet
from laconic.tools.lab.settings import Lab
from laconic.tools.lab.tasks import check_data
from laconic.tools.launch.links import link as parse_link
from laconic.tools.launch.workers import variables
from laconic.tools.planner.collectives import ALGORITHMS, Algorithm, Formula
from laconic.tools.planner.shapes import Shapes
from laconic.tools.planner.units import seconds_of
from laconic.tools.simulate.conditions import Conditions, failures_of, stragglers_of
from laconic.tools.simulate.results import SimulatedOutcome, as_object, outcome_of
from laconic.tools.simulate.tasks import SimulatedTask, lab_task, user_task
from laconic.tools.simulate.time_only import TimeOnly, TimeOutcome
from laconic.tools.simulate.training import SimulatedRun, Training

_TIME, _OUT = "The virtual clock", "Output"


def simulate(
    command: typer.Context,
    plan: Annotated[list[str] | None, typer.Option(help="A plan; repeat for more. Default: ddp().")] = None,
    workers: Annotated[int, typer.Option(help="Workers.")] = 64,
    steps: options.Steps = 100,
    step: Annotated[str, typer.Option(help="What a step computes for, such as 50ms.", rich_help_panel=_TIME)] = "50ms",
    jitter: Annotated[
        float, typer.Option(help="Standard deviation of a worker's step, relative to it.", rich_help_panel=_TIME)
    ] = 0.0,
    stragglers: Annotated[
        str | None, typer.Option(help="2@1.5x: two workers take 1.5 times as long.", rich_help_panel=_TIME)
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help='200mbit, or "8 @ 300GB/s, 8 @ 1Gb/s". Default: no time.', rich_help_panel=_TIME),
    ] = None,
    latency: Annotated[
        str | None, typer.Option(help="Latency of a message, such as 0.2ms. Default: 0.", rich_help_panel=_TIME)
    ] = None,
    algorithm: Annotated[
        str, typer.Option(help=f"Of an all_reduce: {', '.join(ALGORITHMS)}.", rich_help_panel=_TIME)
    ] = "ring",
    fail: Annotated[
        list[str] | None,
        typer.Option(help="5@300: worker 5 is lost when step 300 begins; repeat for more.", rich_help_panel=_TIME),
    ] = None,
    time_only: Annotated[
        bool, typer.Option("--time-only", help="Do not train: the clock alone.", rich_help_panel=_TIME)
    ] = False,
    mtbf: Annotated[
        str | None,
        typer.Option(help="With --time-only: time between faults of the whole run.", rich_help_panel=_TIME),
    ] = None,
    restart: Annotated[
        str | None,
        typer.Option(help="With --mtbf: what a fault costs beside the round it loses.", rich_help_panel=_TIME),
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="gpt, resnet, or module:function (docs/simulate.md).", rich_help_panel="The model"),
    ] = DEFAULT.model,
    layers: options.Layers = DEFAULT.layers,
    width: options.Width = DEFAULT.width,
    context: options.Context = DEFAULT.context,
    batch: options.Batch = DEFAULT.batch,
    lr: options.Lr = DEFAULT.lr,
    seed: options.Seed = DEFAULT.seed,
    data: options.Data = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=_OUT)] = False,
    plain: options.Plain = False,
) -> None:
    """Train with many workers in this process, or only tell the time that they would take.

    Codecs, schedules and outer steps are the real ones. Losses are those of real processes, bit for bit.
    """
    check_count("workers", workers)
    plans = [parse_plan(text) for text in plan or ["ddp()"]]
    place = model if ":" in model else None
    settings = options.lab_settings(command, model=DEFAULT.model if place else model)
    network = _network(link, latency, algorithm, workers)
    slow = stragglers_of(stragglers, workers)
    given = Conditions(seconds_of(step, "--step"), jitter, slow, network, seed)
    _check_mode(time_only, fail, mtbf, restart)
    if time_only:
        shapes = Shapes(meta(_meta_model(settings, place)))
        mtbf_s = None if mtbf is None else seconds_of(mtbf, "--mtbf")
        restart_s = 0.0 if restart is None else seconds_of(restart, "--restart")
        machine = _machine(network)
        runs = [TimeOnly(each, shapes, workers, given, mtbf_s, restart_s, machine) for each in plans]
        _show_times([run.run(steps) for run in runs], shapes.parameters, json)
        return
    failures = failures_of(fail or [], workers, steps)
    if place is None:
        check_data(settings)
    local = {} if _machine(network) is None else {"LOCAL_WORLD_SIZE": str(_machine(network))}
    view = SimulationView(steps, plain, quiet=json)
    outcomes = []
    with variables(local), view:
        for each in plans:
            task = lab_task(settings) if place is None else user_task(place, seed)
            run = SimulatedRun(each, workers, steps, lr, settings.bucket_mb, given, failures)
            outcomes.append(_train(run, task, view))
    view.results(outcomes, _title(outcomes[0], network))
    if json:
        _print_json([as_object(outcome) for outcome in outcomes])


def _train(run: SimulatedRun, task: SimulatedTask, view: SimulationView) -> SimulatedOutcome:
    training, steps = Training(run, task), []
    for each in training.steps():
        steps.append(each)
        view.progress(repr(run.plan), each, training.clock.use())
    return outcome_of(training, steps)


def _check_mode(time_only: bool, fail: list[str] | None, mtbf: str | None, restart: str | None) -> None:
    if time_only and fail:
        raise UsageError(f"--time-only --fail {fail[0]}: without training, faults come at a rate. Use --mtbf 12h.")
    if not time_only and (mtbf or restart):
        raise UsageError("--mtbf and --restart are for --time-only. A training loses workers with --fail 5@30.")


def _network(text: str | None, latency: str | None, algorithm: str, workers: int) -> Formula | None:
    chosen: Algorithm | None = next((each for each in ALGORITHMS if each == algorithm), None)
    if chosen is None:
        raise UsageError(f"--algorithm {algorithm}: write one of {', '.join(ALGORITHMS)}.")
    if text is None:
        return None
    return Formula(parse_link(text, workers), 0.0 if latency is None else seconds_of(latency, "--latency"), chosen)


def _machine(network: Formula | None) -> int | None:
    """The workers of one machine: those of the innermost level of a link that has several."""
    return network.link.levels[0].count if network is not None and len(network.link.levels) > 1 else None


def _meta_model(settings: Lab, place: str | None) -> torch.nn.Module:
    with torch.device("meta"):
        if place is not None:
            return user_task(place, settings.seed).model
        if settings.model == "resnet":
            return ResNet(settings.layers, settings.width, settings.seed)
        return GPT(settings.layers, settings.width, settings.heads, settings.seed)


def _title(first: SimulatedOutcome, network: Formula | None) -> str:
    lost = "" if first.left == first.workers else f" ({first.left} left)"
    link = "" if network is None else f", link {network.link}"
    return f"{first.parameters:,} parameters, {first.workers} workers{lost}, {first.last.step} steps{link}"


def _show_times(outcomes: list[TimeOutcome], parameters: int, json: bool) -> None:
    if json:
        _print_json([asdict(each) | {"step_s": each.step_s, "utilisation": each.use.computing} for each in outcomes])
    else:
        time_table(outcomes, parameters)


def _print_json(runs: list[dict[str, object]]) -> None:
    sys.stdout.write(json_format.dumps({"runs": runs}) + "\n")
