"""`laconic plan`: what each plan would do on a network, without training. Its options; `forecast.py` does the work."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

_model = partial(typer.Option, rich_help_panel="The model")
_network = partial(typer.Option, rich_help_panel="The network")
Optimizer: TypeAlias = Literal["adaptive", "sgd", "muon"]
"""Those of `laconic.plans.targets.Kind`."""
STEPS = 1000
"""That of `laconic.tools.planner.quality`, which needs torch: `laconic plan --help` does without."""
_PROBE = "What laconic probe has measured: the model, the network, the step, the codecs."
_TRAINABLE = "Of --parameters, those that are trained, as adapters (LoRA)."
_BARE = "The model is not in DDP: gradients are sent after backward."
_OPTIMIZER = "The optimizer: adaptive (Adam and its like), sgd or muon."
_LINK = '1gbit; or levels, the machine first: "8 @ 300GB/s, 4 @ 1Gb/s".'
_NOISE = "The gradient noise scale, session.health.noise, such as 3.5."
Plans = Annotated[list[str] | None, typer.Option(help="A plan; repeat for more. Default: the measured front.")]


def plan(
    plan: Plans = None,
    probe: Annotated[Path | None, typer.Option(help=_PROBE)] = None,
    model: Annotated[str | None, _model(help="module:function that makes the model.")] = None,
    parameters: Annotated[str | None, _model(help="Parameters of a transformer, such as 350M.")] = None,
    trainable: Annotated[str | None, _model(help=_TRAINABLE)] = None,
    bare: Annotated[bool, _model("--bare", help=_BARE)] = False,
    step: Annotated[str | None, _model(help="A step without communication, such as 250ms.")] = None,
    steps: Annotated[int, _model(help="Steps of the whole training.")] = STEPS,
    optimizer: Annotated[Optimizer, _model(help=_OPTIMIZER)] = "adaptive",
    workers: Annotated[int | None, _network(help="Workers.")] = None,
    link: Annotated[str | None, _network(help=_LINK)] = None,
    latency: Annotated[str | None, _network(help="Latency of a message, such as 0.2ms. Default: 0.")] = None,
    noise: Annotated[float | None, typer.Option(help=_NOISE)] = None,
    all_: Annotated[bool, typer.Option("--all", help="Show all columns.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with everything that is predicted.")] = False,
) -> None:
    """Predict what each plan sends, how long a step takes, and which one reaches the same loss first.

    It may say: do not compress. Give a model, a network and the time of a step, or measure them with laconic probe.
    """
    given = locals()  # the options, by name
    from laconic.cli import forecast

    forecast.show(forecast.PlanOptions(**given))
