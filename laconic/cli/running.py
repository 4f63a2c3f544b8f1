"""Runs trainings one after another and shows them, for `train` and `compare`."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import torch.distributed as dist

from laconic.cli.results import check_writable, write_json
from laconic.cli.view import Row, View, make_view
from laconic.tools.compare.inputs import given_files
from laconic.tools.compare.progress import Progress, progress_file
from laconic.tools.compare.records import Outcome, read_outcome
from laconic.tools.compare.report import check_drawable, write_page, write_png
from laconic.tools.compare.reporter import read_files, write_goal
from laconic.tools.compare.running import launch, report_variables
from laconic.tools.compare.settings import Run, Script, Settings
from laconic.tools.compare.unfinished import Finished, Unfinished
from laconic.tools.errors import UsageError
from laconic.tools.lab import script as lab
from laconic.tools.lab.tasks import check_data
from laconic.tools.launch.folders import run_folder
from laconic.tools.launch.links import Link
from laconic.tools.launch.slow_link import NoSlowLink, slow_link
from laconic.tools.launch.tail import following
from laconic.tools.launch.workers import Network, Place, check_workers, found_place, variables
from laconic.tools.machine import usable_cores


@dataclass(frozen=True)
class CommandOptions:
    """The options of a command that do not belong to its runs."""

    oversubscribe: bool
    json: Path | None
    plain: bool
    report: Path | None = None
    png: Path | None = None
    link: Link | None = None
    compute_link: bool = False
    resume: bool = False


def run_all(runs: Sequence[Run], options: CommandOptions, labels: Mapping[Row, str]) -> None:
    """Run the trainings on workers of this machine, or as one worker of torchrun's, and show and write the results.

    `labels` are the names of the workers that are shown.
    """
    place = found_place(os.environ)
    _check(runs[0], options, place)
    unfinished = Unfinished(runs, None if options.link is None else f"{options.link} {options.compute_link}")
    if place is None:
        view = make_view(labels, options.plain)
        outcomes = _run_launched(runs, options, view, unfinished)
    else:
        own = {row: label for row, label in labels.items() if row.worker == 0}
        view = make_view(own, options.plain) if place.worker == 0 else View()
        outcomes = _run_in_place([run for run in runs if isinstance(run, Settings)], view, place)
    if outcomes:
        view.results(outcomes)
        _write(outcomes, options)
        unfinished.remove()


def _write(outcomes: Sequence[Outcome], options: CommandOptions) -> None:
    if options.json is not None:
        write_json(options.json, outcomes)
    if options.report is not None:
        write_page(options.report, outcomes, sys.argv[1:])
    if options.png is not None:
        write_png(options.png, outcomes)


def _check(run: Run, options: CommandOptions, place: Place | None) -> None:
    """Check everything before any worker starts. The runs of a command differ only in their plan."""
    for option, path in (("--json", options.json), ("--report", options.report), ("--png", options.png)):
        if path is not None:
            check_writable(path, option)
            if option != "--json":
                check_drawable(f"{option} {path}")
    if place is None:
        if not options.oversubscribe:
            check_workers(run.workers, usable_cores())
    elif isinstance(run, Script) or options.link is not None:
        raise UsageError(
            f"{'--script' if isinstance(run, Script) else '--link'}: torchrun has already started the workers, and "
            "this option starts them itself. Run laconic without torchrun."
        )
    if isinstance(run, Settings):
        check_data(run)


def _run_launched(runs: Sequence[Run], options: CommandOptions, view: View, unfinished: Unfinished) -> list[Outcome]:
    """Start workers for each run that was not finished before."""
    with _network(options, view) as network:
        known, changed = unfinished.load() if options.resume else ([], None)
        finished = list(takewhile(lambda each: each.outcome.clock == network.clock, known))
        if changed is not None:
            view.message(f"{changed} has changed: results from before are not used again")
        if finished:
            view.message(
                f"continuing after {len(finished)} of {len(runs)} plans, finished before; --fresh starts again"
            )
        view.outcomes += [each.outcome for each in finished]
        with view.running():
            for index, run in list(enumerate(runs))[len(finished) :]:
                finished.append(_launch(run, Network() if run.without_link else network, view, index))
                view.finish(finished[-1].outcome)
                if len(runs) > 1:
                    unfinished.save(finished)
    return [each.outcome for each in finished]


@contextmanager
def _network(options: CommandOptions, view: View) -> Iterator[Network]:
    """The network of the command. A link is a real one, or a computed one where that is not possible."""
    network = Network(computed=options.link)
    with ExitStack() as stack:
        if options.link is not None and not options.compute_link:
            try:
                network = Network(slow=stack.enter_context(slow_link(options.link)))
            except NoSlowLink as error:
                view.message(
                    f"no real link of {options.link} can be made here ({error}): the runs go at full speed, and the "
                    "link's time is computed from the bytes that they send."
                )
        yield network


def _launch(run: Run, network: Network, view: View, index: int) -> Finished:
    before, inputs = network.uplink_bytes(), given_files(run)
    with run_folder() as folder:
        files = [progress_file(folder, worker) for worker in range(run.workers)]
        with following(files, _shower(view, index)):
            outcome = launch(run, folder, network)
        inputs |= read_files(folder)
    uplink_bytes = {name: count - before[name] for name, count in network.uplink_bytes().items()}
    link = None if network.link is None else str(network.link)
    return Finished(replace(outcome, link=link, clock=network.clock, uplink_bytes=uplink_bytes), inputs)


def _run_in_place(runs: Sequence[Settings], view: View, place: Place) -> list[Outcome]:
    """Run the lab's script in this process, which is a worker of torchrun's. Only worker 0 has outcomes."""
    dist.init_process_group("gloo", timeout=lab.TIMEOUT)
    outcomes = []
    try:
        with view.running():
            for index, run in enumerate(runs):
                with run_folder() as folder:
                    write_goal(folder, run.goal, computed=None)
                    shown = following([progress_file(folder, place.worker)], _shower(view, index))
                    with variables(report_variables(run, folder)), shown:
                        lab.main(run.arguments(folder))
                    if place.worker == 0:
                        outcomes.append(read_outcome(run, folder, only_worker=0))
                        view.finish(outcomes[-1])
    finally:
        dist.destroy_process_group()
    return outcomes


def _shower(view: View, run: int) -> Callable[[str], None]:
    def show(line: str) -> None:
        progress = Progress(**json.loads(line))
        view.progress(Row(run, progress.worker), progress)

    return show
