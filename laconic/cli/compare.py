"""`laconic compare`: several plans on the same training, over a link of a given speed, with a line for each plan."""

from dataclasses import replace
from typing import Annotated

import typer

from laconic.cli import options
from laconic.cli.running import Surroundings, run_all, workers_here
from laconic.cli.view import Row
from laconic.compare.links import Link, LinkError
from laconic.compare.links import link as link_from
from laconic.compare.script import Script
from laconic.compare.settings import LabError, Settings
from laconic.compare.unfinished import Run

DEFAULT_PLANS = ("ddp()", "power_sgd(rank=4)", "post_local_sgd(period=16)")
_DEFAULT = Settings(plan=DEFAULT_PLANS[0])


def compare(
    arguments: Annotated[
        list[str] | None, typer.Argument(help="After --: what the script is given.", show_default=False)
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option(help=f"A plan to compare; repeat for more. Default: {', '.join(DEFAULT_PLANS)}."),
    ] = None,
    link: options.LinkText = None,
    hosts: options.HostCount = None,
    computed: options.Computed = False,
    script: options.ScriptPath = None,
    workers: options.Workers = None,
    steps: options.StepsAtMost = None,
    seconds: options.Seconds = None,
    until_loss: options.UntilLoss = None,
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
    report: options.Report = None,
    png: options.Png = None,
    plain: options.Plain = False,
    fresh: options.Fresh = False,
    port: options.Port = 0,
    oversubscribe: options.Oversubscribe = False,
) -> None:
    """Run the same training once with each plan, and compare loss, bytes and time.

    A comparison that was stopped goes on with the plans that are missing when the same command is given again.
    """
    count = _count(hosts, workers, link)
    joined = _link(link, count)
    workers = count if joined is None else joined.workers
    plans = plan or list(DEFAULT_PLANS)
    first: Run
    if script is not None:
        first = Script(plans[0], script, tuple(arguments or ()), workers_here(workers), steps, seconds, until_loss)
    else:
        if arguments:
            raise LabError(f"-- {' '.join(arguments)}: these are for a script. Give one with --script train.py.")
        first = Settings(
            plan=plans[0],
            workers=workers_here(workers),
            steps=_DEFAULT.steps if steps is None else steps,
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
            seconds=seconds,
            until_loss=until_loss,
        )
    around = Surroundings(port, oversubscribe, json, plain, report, png, joined, computed, resume=not fresh)
    runs = [replace(first, plan=text) for text in plans]
    labels = {Row(index, worker=0): run.plan for index, run in enumerate(runs)}
    run_all(runs, around, labels)


def _count(hosts: int | None, workers: int | None, link: str | None) -> int | None:
    """One worker a host, so either option gives the number."""
    if hosts is None:
        return workers
    if link is None:
        raise LabError(f"--hosts {hosts}: hosts are joined by a link. Add one, such as --link 100mbit.")
    if workers not in (None, hosts):
        raise LabError(f"--hosts {hosts} --workers {workers}: there is one worker a host. Leave out --workers.")
    if hosts < 1:
        raise LabError(f"--hosts {hosts}: there must be at least 1. Use --hosts 2 or more.")
    return hosts


def _link(text: str | None, workers: int | None) -> Link | None:
    if text is None:
        return None
    try:
        return link_from(text, workers_here(workers) if "@" not in text else workers)
    except LinkError as error:
        raise LabError(f"--link {error}") from None
