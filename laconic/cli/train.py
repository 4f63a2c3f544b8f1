"""`laconic train`: one plan, with a line for each worker."""

from typing import Annotated

import typer

from laconic.cli import options
from laconic.cli.running import Surroundings, run_all, workers_here
from laconic.cli.view import Row
from laconic.compare.settings import Settings

_DEFAULT = Settings(plan="ddp()")


def train(
    plan: Annotated[str, typer.Option(help='How workers talk, such as "power_sgd(rank=4)".')] = "ddp()",
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
    """Train a small model with one plan, on workers of this machine or under torchrun."""
    settings = Settings(
        plan=plan,
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
    labels = {Row(0, worker): f"worker {worker}" for worker in range(settings.workers)}
    run_all([settings], Surroundings(port, oversubscribe, json, plain), labels)
