"""`laconic plan`: what each plan would do on a network, without training."""

import json as json_format
import sys
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from laconic import Exact
from laconic import plan as parse_plan
from laconic.cli.tables import PipedConsole, table
from laconic.cost import meta
from laconic.plans.plan import Plan
from laconic.plans.targets import Kind
from laconic.tools.errors import UsageError, check_count
from laconic.tools.launch.links import Link
from laconic.tools.launch.links import link as parse_link
from laconic.tools.planner.auto import auto
from laconic.tools.planner.forecast import Forecast
from laconic.tools.planner.front import PLANS
from laconic.tools.planner.network import ComputedNetwork, MeasuredNetwork
from laconic.tools.planner.predict import Prediction, Scenario
from laconic.tools.planner.probe_data import MACHINE, Probe, ProbeError
from laconic.tools.planner.quality import STEPS, Kept
from laconic.tools.planner.shapes import Shapes, adapters, from_count, from_file, from_module
from laconic.tools.units import BYTES, COUNT, DURATION, human_bytes, parse, rate_text, share

_MODEL, _NETWORK = "The model", "The network"
OUTCOME = ("sent\na step", "step", "computing", "kept", "sooner\nthan ddp", "than\nalone")
"""The columns that decide: "sooner" is to the same loss."""
DETAILS = ("exposed", "steps faster\nthan ddp", "memory", "break-even", "timeout")
MOST_LAYERS = 10_000
NAMES: dict[Kind, str] = {"adaptive": "Adam or its like", "sgd": "SGD", "muon": "Muon"}
ONE_TABLE = 135
"""The width of a terminal in which all columns fit into one table."""


def plan(
    plan: Annotated[
        list[str] | None, typer.Option(help="A plan; repeat for more. Default: the measured front.")
    ] = None,
    probe: Annotated[
        Path | None, typer.Option(help="What laconic probe has measured: the model, the network, the step, the codecs.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="module:function that makes the model.", rich_help_panel=_MODEL)
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(help="Parameters of a transformer, such as 350M.", rich_help_panel=_MODEL)
    ] = None,
    trainable: Annotated[
        str | None,
        typer.Option(help="Of --parameters, those that are trained, as adapters (LoRA).", rich_help_panel=_MODEL),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(help="Layers, each of which is sent as soon as its gradient is known.", rich_help_panel=_MODEL),
    ] = None,
    shapes: Annotated[
        Path | None, typer.Option(help='JSON of shapes: {"layer.weight": [512, 512]}.', rich_help_panel=_MODEL)
    ] = None,
    bare: Annotated[
        bool,
        typer.Option(
            "--bare", help="The model is not in DDP: gradients are sent after backward.", rich_help_panel=_MODEL
        ),
    ] = False,
    step: Annotated[
        str | None, typer.Option(help="A step without communication, such as 250ms.", rich_help_panel=_MODEL)
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of the whole training.", rich_help_panel=_MODEL)] = STEPS,
    optimizer: Annotated[
        Kind, typer.Option(help="The optimizer: adaptive (Adam and its like), sgd or muon.", rich_help_panel=_MODEL)
    ] = "adaptive",
    workers: Annotated[int | None, typer.Option(help="Workers.", rich_help_panel=_NETWORK)] = None,
    link: Annotated[
        str | None,
        typer.Option(help='1gbit; or levels, the machine first: "8 @ 300GB/s, 4 @ 1Gb/s".', rich_help_panel=_NETWORK),
    ] = None,
    latency: Annotated[
        str | None, typer.Option(help="Latency of a message, such as 0.2ms. Default: 0.", rich_help_panel=_NETWORK)
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(help="The gradient noise scale, session.health.noise, such as 3.5."),
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Bytes that a worker may send a day, such as 500GB.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with everything that is predicted.")] = False,
) -> None:
    """Predict what each plan sends, how long a step takes, and which one reaches the same loss first.

    It may say: do not compress. Give a model, a network and the time of a step, or measure them with laconic probe.
    """
    plans = [parse_plan(text) for text in plan or ()] or PLANS
    check_count("workers", workers)
    check_count("steps", steps)
    if auto() in plans:
        raise UsageError(
            "--plan auto: it measures a training and then chooses one of the plans that are compared without --plan. "
            "Leave it out."
        )
    limit = None if budget is None else parse(budget, BYTES, "--budget")
    measured = None if probe is None else _probe(probe)
    found = _shapes(model, parameters, trainable, layers, shapes, measured)
    network, count, machine = _network(link, workers, latency, measured)
    codec_s = {} if measured is None else {parse_plan(each.plan): each.seconds for each in measured.codecs}
    for each in plans:
        check_levels(each, count)
    if noise is not None and not (isfinite(noise) and noise >= 0):
        raise UsageError(f"--noise {noise}: it must be 0 or more, such as 3.5: a guard measures it as it trains.")
    step_s, spread = _step_s(step, measured), _spread(measured)
    scenario = Scenario(found, count, network, step_s, codec_s, machine, spread, bare, noise, steps, (optimizer,))
    try:
        forecast = Forecast(plans, scenario)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if json:
        print(json_format.dumps(forecast.as_json(limit), indent=1))
        return
    console = PipedConsole(width=None if sys.stdout.isatty() else ONE_TABLE)
    console.print(*forecast_tables(forecast, console.width, limit))
    notes = [
        f"kept: predicted for {steps} steps with {NAMES[optimizer]}, and its interval for nine of ten trainings, from "
        "the trainings in docs/quality.md; - where nothing like it was measured."
    ]
    if noise is not None:
        notes.append(f"{count} workers are worth {scenario.gain:.1f} here: a noise of {noise:g} batches of one worker.")
    unknown = [repr(each.plan) for each in forecast.rows if each.plan.codec != Exact() and each.plan not in codec_s]
    if measured is None:
        notes.append("The time of codecs was not measured and counts as 0: laconic probe measures it.")
    elif unknown:
        notes.append(f"The codec of {', '.join(unknown)} is not in the probe and counts as 0: probe with --plan.")
    for line in (*notes, forecast.advice):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def check_levels(plan: Plan, workers: int) -> None:
    """Refuse a plan with groups into which so many workers cannot be divided."""
    for size in plan.levels:
        if isinstance(size, int) and workers % size:
            raise UsageError(
                f"--plan {plan!r}: it asks for groups of {size}, and {workers} workers cannot be divided so. Choose a "
                f"size that divides {workers}."
            )


def forecast_tables(forecast: Forecast, width: int, budget_bytes: float | None = None) -> list[Table]:
    """One row for each plan, the soonest at the same loss first; in two tables, if the terminal is narrow."""
    s = forecast.scenario
    rate = rate_text(s.network.rate_bps, digits=4)
    title = f"{s.shapes.parameters:,} parameters, {s.workers} workers, {s.compute_s:.4g} s a step, {rate}"
    details = DETAILS if budget_bytes is None else (*DETAILS, "within\nbudget")
    cells = [(repr(each.plan), _cells(forecast, each, budget_bytes)) for each in forecast.ranked]
    shown = [(OUTCOME + details, title)] if width >= ONE_TABLE else [(OUTCOME, title), (details, "")]
    return [
        table(("plan", *headings), [(plan, *(row[each] for each in headings)) for plan, row in cells], title)
        for headings, title in shown
    ]


def _cells(forecast: Forecast, each: Prediction, budget_bytes: float | None) -> dict[str, str]:
    low, high = each.interval_s
    rate = None if each is forecast.ddp else each.break_even_bps(forecast.ddp)
    cells = {
        "sent\na step": human_bytes(each.sent_bytes_per_step),
        "step": f"{each.step_s:.3g} s" if low == high else f"{each.step_s:.3g} s\n{low:.2g} to {high:.2g}",
        "computing": share(each.now.utilisation),
        "kept": _kept(each.predicted),
        "sooner\nthan ddp": _times(each.sooner_than(forecast.ddp)),
        "than\nalone": _times(each.sooner_than(forecast.alone)),
        "exposed": f"{each.now.exposed_s:.3g} s",
        "steps faster\nthan ddp": _times(forecast.ddp.step_s / each.step_s),
        "memory": human_bytes(each.memory_bytes),
        "break-even": "-" if rate is None else "any" if rate <= 0 else rate_text(rate, digits=3),
        "timeout": f"{each.timeout_s} s",
    }
    if budget_bytes is not None:
        cells["within\nbudget"] = "yes" if each.bytes_a_day <= budget_bytes else "no"
    return cells


def _kept(found: Kept | None) -> str:
    if found is None or found.low == found.high:
        return share(None if found is None else found.value)
    return f"{share(found.value)}\n{share(found.low)} to {share(found.high)}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _probe(path: Path) -> Probe:
    try:
        return Probe.read(path)
    except ProbeError as error:
        raise UsageError(f"--probe {error}") from None


def _network(
    text: str | None, workers: int | None, latency: str | None, probe: Probe | None
) -> tuple[ComputedNetwork | MeasuredNetwork, int, int | None]:
    """Return the network, its workers, and those of one machine if it has machines of several."""
    if text is not None:
        found = _link(text, workers)
        machine = found.levels[0].count if len(found.levels) > 1 else None
        return (
            ComputedNetwork(found, 0.0 if latency is None else parse(latency, DURATION, "--latency")),
            found.workers,
            machine,
        )
    if probe is None:
        raise UsageError("a network is missing. Give --link 1gbit --workers 4, or --probe probe.json.")
    return MeasuredNetwork(probe.timings, probe.workers), probe.workers, probe.levels.get(MACHINE)


def _link(text: str, workers: int | None) -> Link:
    if workers is None and "@" not in text:
        raise UsageError(f"--link {text}: the number of workers is missing. Add --workers 4.")
    return parse_link(text, workers)


def _step_s(step: str | None, probe: Probe | None) -> float:
    if step is not None:
        return parse(step, DURATION, "--step")
    if probe is None:
        raise UsageError(
            "the time of a step without communication is missing. Give --step 250ms, or --probe probe.json."
        )
    if probe.step is None:
        raise UsageError(
            "the probe has no time of a step: its --model returned a model alone. Give --step 250ms, or probe again "
            "with --step-script train.py."
        )
    return probe.step.seconds


def _shapes(
    model: str | None,
    parameters: str | None,
    trainable: str | None,
    layers: int | None,
    shapes: Path | None,
    probe: Probe | None,
) -> Shapes:
    given = [name for name, value in (("--model", model), ("--parameters", parameters), ("--shapes", shapes)) if value]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: one model is enough. Leave out one of them.")
    if layers is not None and (not 1 <= layers <= MOST_LAYERS or parameters is None):
        raise UsageError(
            f"--layers {layers}: it divides --parameters, and must be from 1 to {MOST_LAYERS}. Add --parameters 350M, "
            "or choose fewer layers."
        )
    if parameters is not None:
        whole = from_count(round(parse(parameters, COUNT, "--parameters")), layers)
        return whole if trainable is None else _adapters(whole, round(parse(trainable, COUNT, "--trainable")))
    if trainable is not None:
        raise UsageError(
            f"--trainable {trainable}: it says how many of --parameters are trained. Add --parameters 8B, the size of "
            "the whole model. Of --model and --shapes, what is trained is known."
        )
    if model is not None:
        return from_module(model)
    if shapes is not None:
        return from_file(shapes)
    if probe is not None:
        return Shapes(meta(probe.model.shapes))
    raise UsageError("a model is missing. Give --parameters 350M, --model module:function, --shapes or --probe.")


def _adapters(whole: Shapes, trainable: int) -> Shapes:
    if not 1 <= trainable <= whole.parameters:
        raise UsageError(
            f"--trainable {trainable}: it must be from 1 to the {whole.parameters} of --parameters, such as 40M. To "
            "train all of them, leave it out."
        )
    return adapters(whole, trainable)


def _spread(probe: Probe | None) -> tuple[float, float]:
    """The lowest and highest time of a probe, relative to the median: half of the samples lie between."""
    if probe is None:
        return 1.0, 1.0
    spreads = [each.spread for each in probe.timings] + ([probe.step.spread] if probe.step else [])
    middle = sorted(spreads)[len(spreads) // 2]
    return max(0.0, 1 - middle), 1 + middle
