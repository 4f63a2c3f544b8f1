"""`laconic compare`: the same training with several plans, over a link of a given speed, with a line for each plan."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer

from laconic import plan as parse_plan
from laconic.atomic_write import write_atomically
from laconic.cli import options
from laconic.cli.options import DEFAULT
from laconic.cli.results import check_writable
from laconic.cli.view import View, make_view
from laconic.plans.methods import alone, ddp
from laconic.plans.plan import Plan
from laconic.tools.compare.judging import as_json
from laconic.tools.compare.records import Outcome, Report, read_results, report_file
from laconic.tools.compare.report import check_drawable, write_page
from laconic.tools.compare.running import describe, launch, run_in_place
from laconic.tools.compare.runs import VALIDATE_EVERY, Goal, Script, TrainingRun
from laconic.tools.errors import UsageError
from laconic.tools.lab.script import TIMEOUT
from laconic.tools.lab.settings import STEPS, Lab
from laconic.tools.lab.tasks import check_data
from laconic.tools.launch.folders import run_folder
from laconic.tools.launch.links import Link
from laconic.tools.launch.links import link as parse_link
from laconic.tools.launch.slow_link import NoSlowLink, slow_link
from laconic.tools.launch.tail import following
from laconic.tools.launch.workers import Place, WorkerNetwork, check_workers, found_place, workers_here
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
    Under torchrun it is one of its workers; without, it starts them on this machine.
    """
    given = workers_of(hosts, workers, link)
    connected = link_of(link, given)
    count = workers_here(given if connected is None else connected.workers)
    plans = [parse_plan(text) for text in plan or DEFAULT_PLANS]
    for each in plans:
        each.check_by_steps("laconic compare")
    training: Lab | Script
    if script is not None:
        if guard != DEFAULT.guard:
            raise UsageError(
                f"--guard {guard} --script {script}: a script chooses its own. Write "
                f'attach(..., observers=[laconic.Guard("{guard}")]).'
            )
        training = Script(script, tuple(arguments or ()))
    elif arguments:
        raise UsageError(f"-- {' '.join(arguments)}: these are for a script. Give one with --script train.py.")
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


def link_of(text: str | None, workers: int | None) -> Link | None:
    """Parse a link of so many workers; None if there is none."""
    if text is None:
        return None
    return parse_link(text, workers_here(workers) if "@" not in text else workers)


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
    """Run the trainings on workers of this machine, or as one worker of torchrun's, and show and write the results."""
    place = found_place(os.environ)
    _check(runs[0], given, place)
    if place is None:
        view = make_view(runs, given.plain)
        outcomes = _run_launched(runs, given, view)
    else:
        view = make_view(runs, given.plain) if place.worker == 0 else View()
        outcomes = _run_in_place(runs, view, place)
    if outcomes:
        view.results(outcomes)
        _write(outcomes, given)
        if given.report is not None:
            write_page(given.report, outcomes, sys.argv[1:])


def _write(outcomes: Sequence[Outcome], given: CompareOptions) -> None:
    if given.json is not None:
        write_atomically(given.json, as_json(outcomes).encode())


def _check(run: TrainingRun, given: CompareOptions, place: Place | None) -> None:
    """Check everything before any worker starts. The runs of a command differ only in their plan."""
    if given.json is not None:
        check_writable(given.json)
    if given.report is not None:
        check_writable(given.report, "--report")
        check_drawable(f"--report {given.report}")
    if place is None:
        check_workers(run.workers, usable_cores())
    elif isinstance(run.training, Script) or given.link is not None:
        raise UsageError(
            f"{'--link' if isinstance(run.training, Lab) else '--script'}: torchrun has already started the workers, "
            "and this option starts them itself. Run laconic without torchrun."
        )
    if isinstance(run.training, Lab):
        check_data(run.training)


def _run_launched(runs: Sequence[TrainingRun], given: CompareOptions, view: View) -> list[Outcome]:
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
            _write([*outcomes, *(each for each in known if each not in outcomes)], given)
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
    with run_folder() as folder, following([report_file(folder, 0)], _shower(view, index)):
        return launch(run, folder, network)


def _run_in_place(runs: Sequence[TrainingRun], view: View, place: Place) -> list[Outcome]:
    """Run the lab's script in this process, which is a worker of torchrun's. Only worker 0 has outcomes."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    outcomes = []
    try:
        with view.running():
            for index, run in enumerate(runs):
                with run_folder() as folder, following([report_file(folder, place.worker)], _shower(view, index)):
                    outcome = run_in_place(run, folder, place.worker)
                if outcome is not None:
                    outcomes.append(outcome)
                    view.finish(outcome)
    finally:
        dist.destroy_process_group()
    return outcomes


def _shower(view: View, index: int) -> Callable[[str], None]:
    return lambda line: view.progress(index, Report.read(line))
