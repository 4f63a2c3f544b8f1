"""`laconic compare`: the same training with several plans, over a link of a given speed, with a line for each plan."""

from dataclasses import replace
from typing import Annotated

import typer

from laconic import plan as parse_plan
from laconic.cli import options
from laconic.cli.options import DEFAULT
from laconic.cli.running import CommandOptions, run_all
from laconic.cli.view import Row
from laconic.tools.compare.settings import Run, Script
from laconic.tools.errors import UsageError
from laconic.tools.launch.links import Link
from laconic.tools.launch.links import link as parse_link
from laconic.tools.launch.workers import workers_here

DEFAULT_PLANS = ("ddp()", "alone()", "quantized_ddp(bits=4)", "power_sgd(rank=20)")


def compare(
    command: typer.Context,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="After --: the arguments of the script.", show_default=False)
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option(help=f"A plan to compare; repeat for more. Default: {', '.join(DEFAULT_PLANS)}."),
    ] = None,
    baselines: options.Baselines = True,
    link: options.LinkText = None,
    hosts: options.HostCount = None,
    computed: options.Computed = False,
    script: options.ScriptPath = None,
    workers: options.Workers = None,
    steps: options.StepsAtMost = None,
    seconds: options.Seconds = None,
    until_loss: options.UntilLoss = None,
    validate_every: options.ValidateEvery = DEFAULT.validate_every,
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
    report: options.Report = None,
    png: options.Png = None,
    plain: options.Plain = False,
    fresh: options.Fresh = False,
    oversubscribe: options.Oversubscribe = False,
) -> None:
    """Run the same training once with each plan, and compare loss, bytes and time.

    Two baselines run beside the plans: ddp(), and alone(), whose workers never synchronise.
    If a comparison was stopped, the same command continues it with the missing plans.
    """
    given = workers_of(hosts, workers, link)
    connected = link_of(link, given)
    count = workers_here(given if connected is None else connected.workers)
    plans = _with_baselines(plan or list(DEFAULT_PLANS), baselines and count > 1)
    first: Run
    if script is not None and guard != DEFAULT.guard:
        raise UsageError(
            f"--guard {guard} --script {script}: a script chooses its own. Write "
            f'attach(..., observers=[laconic.Guard("{guard}")]).'
        )
    if script is not None:
        first = Script(plans[0], script, tuple(arguments or ()), count, steps, seconds, until_loss, validate_every)
    elif arguments:
        raise UsageError(f"-- {' '.join(arguments)}: these are for a script. Give one with --script train.py.")
    else:
        steps = DEFAULT.steps if steps is None else steps
        first = options.lab_settings(command, plan=plans[0], workers=count, steps=steps)
    chosen = CommandOptions(oversubscribe, json, plain, report, png, connected, computed, resume=not fresh)
    runs = [replace(first, plan=text) for text in plans]
    if baselines and count > 1 and connected is not None and until_loss is not None:
        runs.append(replace(first, plan="ddp()", without_link=True))
    labels = {Row(index, worker=0): run.label for index, run in enumerate(runs)}
    run_all(runs, chosen, labels)


def _with_baselines(plans: list[str], wanted: bool) -> list[str]:
    """The plans, with `ddp()` before them if it is missing, and `alone()` after it."""
    known = [str(parse_plan(text)) for text in plans]
    if wanted and "ddp()" not in known:
        plans, known = ["ddp()", *plans], ["ddp()", *known]
    if wanted and "alone()" not in known:
        after = known.index("ddp()") + 1
        plans = [*plans[:after], "alone()", *plans[after:]]
    return plans


def workers_of(hosts: int | None, workers: int | None, link: str | None) -> int | None:
    """The number of workers: each host has one, so either option sets it."""
    if hosts is None:
        return workers
    if link is None:
        raise UsageError(f"--hosts {hosts}: hosts are connected by a link. Add one, such as --link 100mbit.")
    if workers not in (None, hosts):
        raise UsageError(f"--hosts {hosts} --workers {workers}: there is one worker per host. Leave out --workers.")
    if hosts < 1:
        raise UsageError(f"--hosts {hosts}: there must be at least 1. Use --hosts 2 or more.")
    return hosts


def link_of(text: str | None, workers: int | None) -> Link | None:
    """Parse a link of so many workers; None if there is none."""
    if text is None:
        return None
    return parse_link(text, workers_here(workers) if "@" not in text else workers)
