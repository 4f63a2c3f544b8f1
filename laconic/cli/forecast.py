"""What `laconic plan` does: it makes a scenario of its options, predicts each plan, and shows the predictions."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch
from rich.table import Table

from laconic.cli.output import PipedConsole, table
from laconic.codecs import Exact
from laconic.cost import meta, size_of
from laconic.exchange import check_sizes
from laconic.plans.plan import Plan
from laconic.plans.targets import Kind
from laconic.plans.text import plan as parse_plan
from laconic.tools.errors import UsageError, check_count
from laconic.tools.planner.network import ComputedNetwork, MeasuredNetwork, Network, computed_network
from laconic.tools.planner.predict import Forecast, Prediction, Scenario
from laconic.tools.planner.probe_data import MACHINE, Probe
from laconic.tools.planner.quality import Kept
from laconic.tools.planner.shapes import Shapes, adapters, from_count, from_module
from laconic.tools.units import COUNT, DURATION, human_bytes, parse, percent, rate_text

OUTCOME = ("sent\na step", "step", "kept", "sooner\nthan ddp")
"""The columns that decide: "sooner" is to the same loss."""
TIMES = ("sooner\nthan alone", "computing", "exposed", "steps faster\nthan ddp")
DETAILS = ("memory", "break-even", "timeout", "sent by\na worker")
NAMES: dict[Kind, str] = {"adaptive": "Adam or its like", "sgd": "SGD", "muon": "Muon"}
ONE_TABLE = 165
"""The width of a terminal in which all columns fit into one table."""
PIPED = 100
"""The width of five columns where there is no terminal."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of `laconic plan`, as they were given."""

    plan: list[str] | None
    probe: Path | None
    model: str | None
    parameters: str | None
    trainable: str | None
    bare: bool
    step: str | None
    steps: int
    optimizer: Kind
    workers: int | None
    link: str | None
    latency: str | None
    noise: float | None
    all_: bool
    json: bool


def show(options: PlanOptions) -> None:
    """Predict each plan, and print the advice, a table and notes; or everything as JSON."""
    torch.set_num_threads(1)  # equations in five unknowns: more threads only wait for each other
    measured = None if options.probe is None else Probe.read(options.probe)
    forecast = make_forecast(options, measured)
    if options.json:
        print(json.dumps(forecast.as_json(), indent=1))
        return
    console = PipedConsole(width=None if sys.stdout.isatty() else ONE_TABLE if options.all_ else PIPED)
    console.print(f"{forecast.advice}\n", markup=False, highlight=False, soft_wrap=True)
    console.print(*forecast_tables(forecast, console.width, options.all_))
    for line in _notes(forecast, measured, options.all_):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def make_forecast(options: PlanOptions, measured: Probe | None) -> Forecast:
    """Predict the plans that are asked for; by default the front, on levels of links also between groups."""
    # Before parsing: this command does not import auto(), so its texts of plans do not know the name.
    if any(text.strip().removeprefix("laconic.").partition("(")[0] == "auto" for text in options.plan or ()):
        raise UsageError(
            "--plan auto: it measures a training and then chooses one of the plans that are compared without --plan. "
            "Leave it out."
        )
    given = [parse_plan(text) for text in options.plan or ()]
    check_count("workers", options.workers)
    check_count("steps", options.steps)
    shapes = _shapes(options, measured)
    network, count, machine = _network(options, measured)
    for each in given:
        check_levels(each, count, machine)
    noise = options.noise
    if noise is not None and not (isfinite(noise) and noise >= 0):
        raise UsageError(f"--noise {noise}: it must be 0 or more, such as 3.5: a guard measures it as it trains.")
    codec_s = {} if measured is None else {parse_plan(each.plan): each.seconds for each in measured.codecs}
    scenario = Scenario(
        shapes,
        count,
        network,
        _step_s(options.step, measured),
        codec_s,
        machine,
        _spread(measured),
        options.bare,
        noise,
        options.steps,
        (options.optimizer,),
    )
    try:
        return Forecast(given or scenario.front, scenario)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _notes(forecast: Forecast, measured: Probe | None, all_columns: bool) -> list[str]:
    s, rows = forecast.scenario, forecast.rows
    kind = s.optimizers[0]
    notes = [
        f"kept: predicted for {s.steps} steps with {NAMES[kind]}, and its interval for nine of ten trainings, from "
        "the trainings in docs/quality.md; - where nothing like it was measured."
    ]
    if s.sharing > 1:
        notes.append(f"sent a step: what {s.sharing} workers send together over the slowest link, which they share.")
    if any(each.group > 1 for each in rows):
        notes.append(
            "group=: a group that averages gradients at every step counts as one worker with so many times the batch, "
            "and kept is of what DDP improves on groups without communication."
        )
    if s.noise is not None:
        notes.append(
            f"{s.workers} workers are worth {s.gain():.1f} here: a noise of {s.noise:g} batches of one worker."
        )
    unknown = [repr(each.plan) for each in rows if each.plan.codec != Exact() and each.plan not in s.codec_s]
    if measured is None:
        notes.append("The time of codecs was not measured and counts as 0: laconic probe measures it.")
    elif unknown:
        notes.append(f"The codec of {', '.join(unknown)} is not in the probe and counts as 0: probe with --plan.")
    if not all_columns:
        return [*notes, "--all shows all columns, --json all that is predicted."]
    return [*notes, *(f"{each.plan} is {each.resolved} here." for each in rows if each.plan != each.resolved)]


def check_levels(plan: Plan, workers: int, machine: int | None) -> None:
    """Refuse a plan with groups into which so many workers cannot be divided."""
    if "machine" in plan.levels and machine is None:
        raise UsageError(
            f"--plan {plan!r}: nothing says how many workers a machine has. Write the levels of the link, machines "
            'first, as in --link "4 @ 100GB/s, 2 @ 1gbit".'
        )
    try:
        check_sizes([size_of(level, workers, machine) for level in plan.levels], workers)
    except ValueError as error:
        raise UsageError(f"--plan {plan!r}: {error}") from None


def forecast_tables(forecast: Forecast, width: int, all_columns: bool = False) -> list[Table]:
    """One row for each plan, the soonest at the same loss first; in several tables, if the terminal is narrow."""
    s = forecast.scenario
    rate = rate_text(s.network.rate_bps, digits=4)
    if isinstance(s.network, ComputedNetwork):
        rate = str(s.network.link)
    title = f"{s.shapes.parameters:,} parameters, {s.workers} workers, {s.compute_s:.4g} s a step, {rate}"
    shown: list[tuple[tuple[str, ...], str]] = [(OUTCOME, title)]
    if all_columns and width >= ONE_TABLE:
        shown = [(OUTCOME + TIMES + DETAILS, title)]
    elif all_columns:
        shown += [(TIMES, ""), (DETAILS, "")]
    return [
        table(
            ("plan", *headings),
            [(repr(each.plan), *(_cell(name, each, forecast) for name in headings)) for each in forecast.ranked],
            title,
        )
        for headings, title in shown
    ]


def _cell(heading: str, each: Prediction, forecast: Forecast) -> str:
    if heading == "break-even":  # which takes long
        rate = None if each is forecast.ddp else each.break_even_bps(forecast.ddp)
        return "-" if rate is None else "any" if rate <= 0 else rate_text(rate, digits=3)
    low, high = each.interval_s
    return {
        "sent\na step": human_bytes(each.link_bytes_per_step),
        "sent by\na worker": human_bytes(each.sent_bytes_per_step),
        "step": f"{each.step_s:.3g} s" if low == high else f"{each.step_s:.3g} s\n{low:.2g} to {high:.2g}",
        "computing": percent(each.now.utilisation),
        "kept": _kept(each.predicted),
        "sooner\nthan ddp": _times(each.sooner_than(forecast.ddp)),
        "sooner\nthan alone": _times(each.sooner_than(forecast.alone)),
        "exposed": f"{each.now.exposed_s:.3g} s",
        "steps faster\nthan ddp": _times(forecast.ddp.step_s / each.step_s),
        "memory": human_bytes(each.memory_bytes),
        "timeout": f"{each.timeout_s} s",
    }[heading]


def _kept(found: Kept | None) -> str:
    if found is None or found.low == found.high:
        return percent(None if found is None else found.value)
    return f"{percent(found.value)}\n{percent(found.low)} to {percent(found.high)}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _network(options: PlanOptions, probe: Probe | None) -> tuple[Network, int, int | None]:
    """Return the network, its workers, and those of one machine if it has machines of several."""
    if options.link is not None:
        if options.workers is None and "@" not in options.link:
            raise UsageError(f"--link {options.link}: the number of workers is missing. Add --workers 4.")
        network = computed_network(options.link, options.latency, options.workers)
        return network, network.link.workers, network.link.machine
    if probe is None:
        raise UsageError("a network is missing. Give --link 1gbit --workers 4, or --probe probe.json.")
    return MeasuredNetwork(probe.timings, probe.workers), probe.workers, probe.levels.get(MACHINE)


def _step_s(step: str | None, probe: Probe | None) -> float:
    if step is not None:
        return parse(step, DURATION, "--step")
    if probe is None:
        raise UsageError(
            "the time of a step without communication is missing. Give --step 250ms, or --probe probe.json."
        )
    if probe.step is None:
        raise UsageError(
            "the probe has no time of a step: its --model returned a model alone. Give --step 250ms, or let --model "
            "also return a function of the loss, and probe again."
        )
    return probe.step.seconds


def _shapes(options: PlanOptions, probe: Probe | None) -> Shapes:
    model, parameters = options.model, options.parameters
    if model and parameters:
        raise UsageError("--model and --parameters: one model is enough. Leave out one of them.")
    if parameters is not None:
        whole = from_count(round(parse(parameters, COUNT, "--parameters")))
        if options.trainable is None:
            return whole
        return _adapters(whole, round(parse(options.trainable, COUNT, "--trainable")))
    if options.trainable is not None:
        raise UsageError(
            f"--trainable {options.trainable}: it says how many of --parameters are trained. Add --parameters 8B, the "
            "size of the whole model. Of --model, what is trained is known."
        )
    if model is not None:
        return from_module(model)
    if probe is not None:
        return Shapes(meta(probe.model.shapes))
    raise UsageError("a model is missing. Give --parameters 350M, --model module:function, or --probe.")


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
