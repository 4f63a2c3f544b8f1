"""`laconic compare`: the same training with several plans, over a link of a given speed, with a line for each plan."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from laconic import plan as parse_plan
from laconic.atomic_write import write_atomically
from laconic.cli import options
from laconic.cli.options import DEFAULT
from laconic.cli.output import check_writable
from laconic.cli.view import View, make_view
from laconic.plans.methods import alone, ddp
from laconic.plans.plan import Plan
from laconic.tools.compare.judging import as_json
from laconic.tools.compare.report import check_drawable, write_page
from laconic.tools.compare.runs import (
    REPORTS,
    VALIDATE_EVERY,
    Goal,
    Outcome,
    Report,
    Script,
    TrainingRun,
    describe,
    launch,
    read_results,
)
from laconic.tools.errors import UsageError
from laconic.tools.lab.tasks import STEPS, Lab, check_data
from laconic.tools.launch.links import Link, NoSlowLink, slow_link
from laconic.tools.launch.output import following, worker_file
from laconic.tools.launch.workers import WorkerNetwork, check_workers, run_folder, workers_here
from laconic.tools.machine import usable_cores

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
    validate_every: options.ValidateEvery = VALIDATE_EVERY,
    model: options.Model = DEFAULT.model,
    layers: options.Layers = DEFAULT.layers,
    width: options.Width = DEFAULT.width,
    context: options.Context = DEFAULT.context,
    batch: options.Batch = DEFAULT.batch,
    lr: options.Lr = DEFAULT.lr,
    seed: options.Seed = DEFAULT.seed,
    data: options.Data = None,
    guard: options.GuardMode = DEFAULT.guard,
    json: options.Json = None,
    report: options.Report = None,
    resume: options.Resume = False,
    plain: options.Plain = False,
) -> None:
    """Run the same training once with each plan, and compare loss, bytes and time.

    Two baselines run beside the plans: ddp(), and alone(), whose workers do not communicate.
    It starts the workers on this machine, one run after another.
    """
    given = workers_of(hosts, workers, link)
    options.refuse_under_torchrun("laconic compare")
    connected = options.link_of(link, given)
    count = workers_here(given if connected is None else connected.workers)
    plans = [parse_plan(text) for text in plan or DEFAULT_PLANS]
    for each in plans:
        each.check_by_steps("laconic compare")
    given_arguments = options.script_arguments(arguments, script)
    training: Lab | Script
    if script is not None:
        if guard != DEFAULT.guard:
            raise UsageError(
                f"--guard {guard} --script {script}: a script chooses its own. Write "
                f'attach(..., observers=[laconic.Guard("{guard}")]).'
            )
        training = Script(script, given_arguments)
    else:
        training = options.lab_settings(command)
        steps = STEPS if steps is None else steps
    if resume and json is None:
        raise UsageError("--resume: it needs the file with the results so far. Add --json results.json.")
    goal = Goal(steps, seconds, until_loss, validate_every)
    wanted = _with_baselines(plans) if baselines and count > 1 else plans
    runs = [TrainingRun(each, training, count, goal) for each in wanted]
    if baselines and count > 1 and connected is not None and until_loss is not None:
        runs.append(replace(runs[0], plan=ddp(), without_link=True))
    run_all(runs, CompareOptions(json, plain, report, connected, computed, resume))


def _with_baselines(plans: list[Plan]) -> list[Plan]:
    """The plans, with `ddp()` before them if it is missing, and `alone()` after it."""
    plans = plans if ddp() in plans else [ddp(), *plans]
    after = plans.index(ddp()) + 1
    return plans if alone() in plans else [*plans[:after], alone(), *plans[after:]]


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


@dataclass(frozen=True)
class CompareOptions:
    """The options of the command that do not belong to its runs."""

    json: Path | None = None
    plain: bool = False
    report: Path | None = None
    link: Link | None = None
    computed: bool = False
    resume: bool = False


def run_all(runs: Sequence[TrainingRun], given: CompareOptions) -> None:
    """Check everything before any worker starts; then run the trainings, and show and write the results."""
    first = runs[0]  # they differ only in their plans
    if given.json is not None:
        check_writable(given.json)
    if given.report is not None:
        check_writable(given.report, "--report")
        check_drawable(f"--report {given.report}")
    check_workers(first.workers, usable_cores())
    if isinstance(first.training, Lab):
        check_data(first.training)
    view = make_view(runs, given.plain)
    outcomes = _run(runs, given, view)
    view.results(outcomes)
    if given.report is not None:
        write_page(given.report, outcomes, sys.argv[1:])


def _run(runs: Sequence[TrainingRun], given: CompareOptions, view: View) -> list[Outcome]:
    """Start workers for each run that has no results yet. The file of --json has those of all that have ended."""
    known = read_results(given.json) if given.resume and given.json is not None and given.json.exists() else []
    outcomes: list[Outcome] = []
    with _network(given, view) as network, view.running():
        for index, run in enumerate(runs):
            here = WorkerNetwork() if run.without_link else network
            finished = next((each for each in known if each.settings == describe(run, here)), None)
            if finished is not None:
                view.message(f"{run.label}: its results are in {given.json}")
            outcomes.append(finished or _launch(run, here, view, index))
            view.finish(outcomes[-1])
            if given.json is not None:
                kept = [each for each in known if each not in outcomes]
                write_atomically(given.json, as_json([*outcomes, *kept]).encode())
    return outcomes


@contextmanager
def _network(given: CompareOptions, view: View) -> Iterator[WorkerNetwork]:
    """The network of the command. A link is a real one, or a computed one where that is not possible."""
    network = WorkerNetwork(computed=given.link)
    with ExitStack() as stack:
        if given.link is not None and not given.computed:
            try:
                network = WorkerNetwork(stack.enter_context(slow_link(given.link)))
            except NoSlowLink as error:
                view.message(
                    f"no real link of {given.link} can be made here ({error}): the runs go at full speed, and the "
                    "link's time is computed from the bytes that they send."
                )
        yield network


def _launch(run: TrainingRun, network: WorkerNetwork, view: View, index: int) -> Outcome:
    """Start the workers of a run, and show what worker 0 reports."""

    def show(line: str) -> None:
        view.progress(index, Report.read(line))

    with run_folder() as folder, following(worker_file(folder, 0, REPORTS), show):
        return launch(run, folder, network)
