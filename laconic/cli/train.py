"""`laconic train`: one plan, with a line for each worker."""

from typing import Annotated

import typer

from laconic.cli import options
from laconic.cli.options import DEFAULT
from laconic.cli.running import CommandOptions, run_all
from laconic.cli.view import Row
from laconic.tools.launch.workers import workers_here


def train(
    command: typer.Context,
    plan: Annotated[str, typer.Option(help='How workers synchronise, such as "power_sgd(rank=20)".')] = DEFAULT.plan,
    workers: options.Workers = None,
    steps: options.Steps = DEFAULT.steps,
    model: options.Model = DEFAULT.model,
    layers: options.Layers = DEFAULT.layers,
    width: options.Width = DEFAULT.width,
    heads: options.Heads = DEFAULT.heads,
    context: options.Context = DEFAULT.context,
    batch: options.Batch = DEFAULT.batch,
    lr: options.Lr = DEFAULT.lr,
    seed: options.Seed = DEFAULT.seed,
    data: options.Data = None,
    bucket_mb: options.BucketMb = DEFAULT.bucket_mb,
    guard: options.GuardMode = DEFAULT.guard,
    json: options.Json = None,
    plain: options.Plain = False,
    oversubscribe: options.Oversubscribe = False,
) -> None:
    """Train a small model with one plan, on workers of this machine or under torchrun."""
    settings = options.lab_settings(command, workers=workers_here(workers))
    labels = {Row(0, worker): f"worker {worker}" for worker in range(settings.workers)}
    run_all([settings], CommandOptions(oversubscribe, json, plain), labels)
