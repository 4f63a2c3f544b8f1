"""`laconic plan`: what each plan would do on a network, without training. Its options; `forecast.py` does the work."""

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

_MODEL, _NETWORK = "The model", "The network"
Optimizer: TypeAlias = Literal["adaptive", "sgd", "muon"]
"""Those of `laconic.plans.targets.Kind`."""
STEPS = 1000
"""That of `laconic.tools.planner.quality`, which needs torch: `laconic plan --help` does without."""


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
        Optimizer,
        typer.Option(help="The optimizer: adaptive (Adam and its like), sgd or muon.", rich_help_panel=_MODEL),
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
    all_: Annotated[bool, typer.Option("--all", help="Show all columns.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with everything that is predicted.")] = False,
) -> None:
    """Predict what each plan sends, how long a step takes, and which one reaches the same loss first.

    It may say: do not compress. Give a model, a network and the time of a step, or measure them with laconic probe.
    """
    given = locals()  # the options, by name
    from laconic.cli import forecast

    forecast.show(forecast.PlanOptions(**given))
