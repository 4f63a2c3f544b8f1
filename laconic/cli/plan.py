"""`laconic plan`: what each plan would do on a network, without training."""

import json as json_format
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from laconic import Exact
from laconic import plan as parse_plan
from laconic.cli.forecast import ONE_TABLE, check_table, forecast_tables, wanted_table
from laconic.cli.results import check_writable
from laconic.cli.view import PipedConsole
from laconic.cost import meta
from laconic.tools.errors import UsageError
from laconic.tools.launch.links import Link
from laconic.tools.launch.links import link as parse_link
from laconic.tools.planner.collectives import ALGORITHMS, Algorithm, Formula
from laconic.tools.planner.explain import explain
from laconic.tools.planner.front import PLANS, SOURCE
from laconic.tools.planner.measured_network import MeasuredNetwork
from laconic.tools.planner.predict import Scenario
from laconic.tools.planner.probe_data import Probe, ProbeError
from laconic.tools.planner.rows import Forecast
from laconic.tools.planner.shapes import Shapes, count_of, from_count, from_file, from_module
from laconic.tools.planner.units import bytes_of, seconds_of, shares_of
from laconic.values import is_number

_MODEL, _NETWORK, _WANT, _OUT = "The model", "The network", "What you need", "Output"


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
    layers: Annotated[
        int | None,
        typer.Option(help="Layers, each of which is sent as soon as its gradient is known.", rich_help_panel=_MODEL),
    ] = None,
    shapes: Annotated[
        Path | None, typer.Option(help='JSON of shapes: {"layer.weight": [512, 512]}.', rich_help_panel=_MODEL)
    ] = None,
    payload_bits: Annotated[
        float | None,
        typer.Option(help="Bits that are sent of each parameter, whatever the codec.", rich_help_panel=_MODEL),
    ] = None,
    step: Annotated[
        str | None, typer.Option(help="A step without communication, such as 250ms.", rich_help_panel=_MODEL)
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Workers.", rich_help_panel=_NETWORK)] = None,
    link: Annotated[
        str | None,
        typer.Option("--link", "--topology", help='1gbit, or "8 @ 300GB/s, 4 @ 1Gb/s".', rich_help_panel=_NETWORK),
    ] = None,
    latency: Annotated[
        str | None, typer.Option(help="Latency of a message, such as 0.2ms. Default: 0.", rich_help_panel=_NETWORK)
    ] = None,
    algorithm: Annotated[
        str, typer.Option(help=f"Of an all_reduce: {', '.join(ALGORITHMS)}.", rich_help_panel=_NETWORK)
    ] = "ring",
    machine: Annotated[
        int | None, typer.Option(help="Workers of one machine, for plans that group these.", rich_help_panel=_NETWORK)
    ] = None,
    bare: Annotated[
        bool,
        typer.Option(
            "--bare", help="The model is not in DDP: gradients are sent after backward.", rich_help_panel=_MODEL
        ),
    ] = False,
    jitter: Annotated[
        float, typer.Option(help="Standard deviation of a worker's step, relative to it.", rich_help_panel=_NETWORK)
    ] = 0.0,
    mtbf: Annotated[
        str | None, typer.Option(help="Time between faults of the whole run, such as 12h.", rich_help_panel=_NETWORK)
    ] = None,
    need: Annotated[
        str | None,
        typer.Option(help="Shares of the time to compute, in %: the rate that each needs.", rich_help_panel=_WANT),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Bytes that a worker may send a day, such as 500GB.", rich_help_panel=_WANT)
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price of a GB that is sent: adds that of 1000 steps.", rich_help_panel=_WANT)
    ] = None,
    gain: Annotated[
        float | None,
        typer.Option(
            help="How many times as many steps as ddp() a worker by itself needs to the same loss. Default: "
            "workers^0.75, 2.8 for 4, as in the lab.",
            rich_help_panel=_WANT,
        ),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(help="Compare with finished runs: a file of compare --json.", rich_help_panel=_OUT),
    ] = None,
    explained: Annotated[
        bool, typer.Option("--explain", help="Show every formula with its numbers.", rich_help_panel=_OUT)
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=_OUT)] = False,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw step time against bandwidth to this file (svg, png).", rich_help_panel=_OUT),
    ] = None,
) -> None:
    """Predict what each plan sends, how long a step takes, and which one reaches the same loss first.

    It may say: do not compress. Give a model, a network and the time of a step, or measure them with laconic probe.
    """
    measured = None if probe is None else _probe(probe)
    _check(algorithm, jitter, gain, payload_bits, machine)
    found = _shapes(model, parameters, layers, shapes, payload_bits is not None, measured)
    network = _network(_link(link, workers), latency, algorithm, measured)
    scenario = Scenario(
        found,
        network.link.workers if isinstance(network, Formula) else network.workers,
        network,
        _step_s(step, measured),
        payload_bits,
        {} if measured is None else {each.plan: each.seconds for each in measured.codecs},
        jitter,
        None if mtbf is None else seconds_of(mtbf, "--mtbf"),
        machine,
        _spread(measured),
        gain,
        bare,
    )
    if picture is not None:
        check_writable(picture, "--picture")
    needs = [] if need is None else shares_of(need, "--need")
    if check is not None:
        Console().print(check_table(check, scenario, plan))
        return
    try:
        forecast = Forecast([parse_plan(text) for text in plan or PLANS], scenario)
    except ValueError as error:
        raise UsageError(str(error)) from error
    limit = None if budget is None else bytes_of(budget, "--budget")
    rows = forecast.as_json(needs, price, limit)
    if picture is not None:
        _draw(forecast, picture)
    if json:
        print(json_format.dumps(rows, indent=1))
        return
    console = PipedConsole(width=None if sys.stdout.isatty() else ONE_TABLE)
    if explained:
        for each in forecast.rows:
            console.print("\n".join(explain(each)), markup=False, highlight=False, soft_wrap=True)
            console.print()
    console.print(*forecast_tables(forecast, console.width))
    if needs or price is not None or limit is not None:
        console.print(wanted_table(rows["rows"]))
    console.print(f"kept: {SOURCE}.", markup=False, highlight=False, soft_wrap=True)
    coded = [repr(each.plan) for each in forecast.rows if each.plan.codec != Exact()]
    unknown = [text for text in coded if text not in scenario.codec_s]
    if measured is None:
        console.print("The time of codecs was not measured and counts as 0: laconic probe measures it.", soft_wrap=True)
    elif unknown:
        text = f"The codec of {', '.join(unknown)} is not in the probe and counts as 0: probe with --plan."
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(rows["advice"], markup=False, highlight=False, soft_wrap=True)


def _probe(path: Path) -> Probe:
    try:
        return Probe.read(path)
    except ProbeError as error:
        raise UsageError(f"--probe {error}") from None


def _network(link: Link | None, latency: str | None, algorithm: str, probe: Probe | None) -> Formula | MeasuredNetwork:
    if link is not None:
        chosen: Algorithm = next(each for each in ALGORITHMS if each == algorithm)
        return Formula(link, 0.0 if latency is None else seconds_of(latency, "--latency"), chosen)
    if probe is None:
        raise UsageError("a network is missing. Give --link 1gbit --workers 4, or --probe probe.json.")
    return MeasuredNetwork(probe.timings, probe.workers)


def _step_s(step: str | None, probe: Probe | None) -> float:
    if step is not None:
        return seconds_of(step, "--step")
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
    layers: int | None,
    shapes: Path | None,
    flat: bool,
    probe: Probe | None,
) -> Shapes:
    given = [name for name, value in (("--model", model), ("--parameters", parameters), ("--shapes", shapes)) if value]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: one model is enough. Leave out one of them.")
    if layers is not None and (layers < 1 or parameters is None):
        raise UsageError(f"--layers {layers}: it divides --parameters, and must be at least 1. Add --parameters 350M.")
    if parameters is not None:
        return from_count(count_of(parameters), layers, flat and layers is not None)
    if model is not None:
        return from_module(model)
    if shapes is not None:
        return from_file(shapes)
    if probe is not None:
        return Shapes(meta(probe.model.shapes))
    raise UsageError("a model is missing. Give --parameters 350M, --model module:function, --shapes or --probe.")


def _link(text: str | None, workers: int | None) -> Link | None:
    if text is None:
        return None
    if workers is None and "@" not in text:
        raise UsageError(f"--link {text}: tell how many workers there are. Add --workers 4.")
    return parse_link(text, workers)


def _check(algorithm: str, jitter: float, gain: float | None, bits: float | None, machine: int | None) -> None:
    if algorithm not in ALGORITHMS:
        raise UsageError(f"--algorithm {algorithm}: it is one of {', '.join(ALGORITHMS)}.")
    if not is_number(jitter) or jitter < 0:
        raise UsageError(f"--jitter {jitter}: it must not be negative. Use 0.1 for 10 %.")
    if gain is not None and not gain >= 1:
        raise UsageError(f"--gain {gain}: a worker by itself needs at least as many steps as ddp(): 1 or more.")
    if bits is not None and not bits > 0:
        raise UsageError(f"--payload-bits {bits}: it must be above 0, such as 16.")
    if machine is not None and machine < 1:
        raise UsageError(f"--machine {machine}: a machine has 1 worker or more.")


def _spread(probe: Probe | None) -> tuple[float, float]:
    """The lowest and highest time of a probe, relative to the median: half of the samples lie between."""
    if probe is None:
        return 1.0, 1.0
    spreads = [each.spread for each in probe.timings] + ([probe.step.spread] if probe.step else [])
    middle = sorted(spreads)[len(spreads) // 2]
    return max(0.0, 1 - middle), 1 + middle


def _draw(forecast: Forecast, path: Path) -> None:
    try:
        from laconic.tools.planner.picture import draw

        draw(forecast.rows, path)
    except ImportError as error:
        raise UsageError(f'--picture {path}: it needs matplotlib ({error}). pip install "laconic[report]".') from error
