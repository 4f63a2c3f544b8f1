"""`laconic compare`: several plans on the same model and data, with a line for each plan."""

from dataclasses import replace
from typing import Annotated

import typer

from laconic.cli import options
from laconic.cli.running import Surroundings, run_all, workers_here
from laconic.cli.view import Row
from laconic.lab.settings import Settings

DEFAULT_PLANS = ("ddp()", "power_sgd(rank=4)", "post_local_sgd(period=16)")
_DEFAULT = Settings(plan=DEFAULT_PLANS[0])


def compare(
    plan: Annotated[
        list[str] | None,
        typer.Option(help=f"A plan to compare; repeat for more. Default: {', '.join(DEFAULT_PLANS)}."),
    ] = None,
    workers: options.Workers = None,
    steps: options.Steps = _DEFAULT.steps,
    model: options.Model = _DEFAULT.model,
    layers: options.Layers = _DEFAULT.layers,
    width: options.Width = _DEFAULT.width,
    heads: options.Heads = _DEFAULT.heads,
    context: options.Context = _DEFAULT.context,
    batch: options.Batch = _DEFAULT.batch,
    lr: options.Lr = _DEFAULT.lr,
    seed: options.Seed = _DEFAULT.seed,
    data: options.Data = None,
    bucket_mb: options.BucketMb = _DEFAULT.bucket_mb,
    json: options.Json = None,
    plain: options.Plain = False,
    port: options.Port = 0,
    oversubscribe: options.Oversubscribe = False,
) -> None:
    """Train the same small model once with each plan, and compare loss, bytes and time."""
    first = Settings(
        plan=(plan or DEFAULT_PLANS)[0],
        workers=workers_here(workers),
        steps=steps,
        model=model,
        layers=layers,
        width=width,
        heads=heads,
        context=context,
        batch=batch,
        lr=lr,
        seed=seed,
        data=data,
        bucket_mb=bucket_mb,
    )
    runs = [replace(first, plan=text) for text in plan or DEFAULT_PLANS]
    labels = {Row(index, worker=0): run.plan for index, run in enumerate(runs)}
    run_all(runs, Surroundings(port, oversubscribe, json, plain), labels)
