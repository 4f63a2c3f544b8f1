"""Runs trainings one after another and shows them: what `train` and `compare` have in common."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import torch.distributed as dist

from laconic.cli.results import check_writable, write_json
from laconic.cli.view import Row, SilentView, View, make_view
from laconic.compare.folders import run_folder
from laconic.compare.lab.tasks import check_data
from laconic.compare.lab.training import Outcome, start_group, train
from laconic.compare.launch import Network, check_port, launch
from laconic.compare.links import Link
from laconic.compare.progress import following
from laconic.compare.records import curve, thinned, with_record
from laconic.compare.report import check_drawable, write_page, write_png
from laconic.compare.reporter import progress_file
from laconic.compare.reporting import Progress
from laconic.compare.script import Script, launch_script
from laconic.compare.settings import LabError, Place, Settings, check_workers, found_place, usable_cores
from laconic.compare.slow_link import NoSlowLink, SlowLink, slow_link
from laconic.compare.unfinished import Run, Unfinished

DEFAULT_WORKERS = 4


@dataclass(frozen=True)
class Surroundings:
    """What a command was told beside the runs themselves."""

    port: int
    oversubscribe: bool
    json: Path | None
    plain: bool
    report: Path | None = None
    png: Path | None = None
    link: Link | None = None
    compute_link: bool = False
    resume: bool = False


def workers_here(given: int | None) -> int:
    """The number of workers: torchrun's if it has started us, else the one given, else four."""
    place = found_place(os.environ)
    if place is None:
        return DEFAULT_WORKERS if given is None else given
    if given not in (None, place.workers):
        raise LabError(
            f"--workers {given}: torchrun has already started {place.workers}. "
            f"Leave out --workers, or give torchrun --nproc-per-node {given}."
        )
    return place.workers


def run_all(runs: Sequence[Run], around: Surroundings, labels: Mapping[Row, str]) -> None:
    """Checks everything that can be checked, trains each run, shows the results and writes them.

    `labels` says which workers of which runs are shown, and under what name.
    """
    place = found_place(os.environ)
    _check(runs[0], around, place)
    view = _view(place, labels, around.plain)
    memory = Unfinished(runs, None if around.link is None else f"{around.link} {around.compute_link}")
    if place is None:
        outcomes = _launched(runs, around, view, memory)
    else:
        outcomes = _in_place([run for run in runs if isinstance(run, Settings)], view)
    view.results(outcomes)
    if place is None or place.worker == 0:
        _write(outcomes, around)
        memory.forget()


def _write(outcomes: Sequence[Outcome], around: Surroundings) -> None:
    if around.json is not None:
        write_json(around.json, outcomes)
    if around.report is not None:
        write_page(around.report, outcomes, sys.argv[1:])
    if around.png is not None:
        write_png(around.png, outcomes)


def _view(place: Place | None, labels: Mapping[Row, str], plain: bool) -> View:
    """Under torchrun, worker 0 alone speaks, and of itself alone."""
    if place is None:
        return make_view(labels, plain)
    if place.worker != 0:
        return SilentView()
    return make_view({row: label for row, label in labels.items() if row.worker == 0}, plain)


def _check(run: Run, around: Surroundings, place: Place | None) -> None:
    """All runs of a command differ only in their plan, so the first stands for all."""
    for option, path in (("--json", around.json), ("--report", around.report), ("--png", around.png)):
        if path is not None:
            check_writable(path, option)
    for option, path in (("--report", around.report), ("--png", around.png)):
        if path is not None:
            check_drawable(f"{option} {path}")
    if place is None:
        check_port(around.port)
        if not around.oversubscribe:
            check_workers(run.workers, usable_cores())
    elif isinstance(run, Script) or around.link is not None:
        raise LabError(
            f"{'--script' if isinstance(run, Script) else '--link'}: torchrun has already started the workers, and "
            "this option starts them itself. Run laconic without torchrun."
        )
    if isinstance(run, Settings):
        check_data(run)


def _launched(runs: Sequence[Run], around: Surroundings, view: View, memory: Unfinished) -> list[Outcome]:
    """Starts workers for each run that is not remembered as finished."""
    with _network(around, view) as (network, slow):
        known = memory.load()[: len(runs)] if around.resume else []
        outcomes = list(takewhile(lambda outcome: outcome.clock == network.clock, known))
        if outcomes:
            view.say(f"going on after {len(outcomes)} of {len(runs)} plans, finished before; --fresh starts anew")
        view.start()
        try:
            for index, run in list(enumerate(runs))[len(outcomes) :]:
                outcomes.append(_one(run, network, slow, view, index, around.link))
                view.finish(outcomes[-1])
                if len(runs) > 1:
                    memory.save(outcomes)
        finally:
            view.close()
    return outcomes


@contextmanager
def _network(around: Surroundings, view: View) -> Iterator[tuple[Network, SlowLink | None]]:
    """The link that was asked for: real, or computed where a real one cannot be."""
    if around.link is None:
        yield Network(around.port), None
        return
    with ExitStack() as stack:
        slow = None
        if not around.compute_link:
            try:
                slow = stack.enter_context(slow_link(around.link))
            except NoSlowLink as error:
                view.say(
                    f"no real link of {around.link} can be made here ({error}): the runs go at full speed, and the "
                    "link's time is computed from the bytes that they send."
                )
        if slow is None:
            yield Network(around.port, computed=around.link), None
        else:
            yield Network(around.port, hosts=slow.hosts), slow


def _one(run: Run, network: Network, slow: SlowLink | None, view: View, index: int, link: Link | None) -> Outcome:
    """One run, from its workers' start to its record."""
    before = {} if slow is None else slow.uplink_bytes()
    with run_folder() as folder:
        files = [progress_file(folder, worker) for worker in range(run.workers)]
        with following(files, _teller(view, index)):
            outcome = _start(run, folder, network)
        outcome = with_record(outcome, folder)
    after = {} if slow is None else slow.uplink_bytes()
    return replace(
        outcome,
        link=None if link is None else str(link),
        clock=network.clock,
        uplink_bytes={name: after[name] - before[name] for name in after},
    )


def _start(run: Run, folder: Path, network: Network) -> Outcome:
    return launch_script(run, folder, network) if isinstance(run, Script) else launch(run, folder, network)


def _in_place(runs: Sequence[Settings], view: View) -> list[Outcome]:
    """Trains as the worker that torchrun has made of this process."""
    start_group()
    outcomes = []
    view.start()
    try:
        for index, settings in enumerate(runs):
            outcomes.append(_one_in_place(settings, _teller(view, index)))
            view.finish(outcomes[-1])
    finally:
        view.close()
        dist.destroy_process_group()
    return outcomes


def _one_in_place(settings: Settings, tell: Callable[[Progress], None]) -> Outcome:
    told: list[Progress] = []

    def note(progress: Progress) -> None:
        told.append(progress)
        tell(progress)

    outcome = train(settings, note)
    return replace(outcome, curve=thinned(curve([told])))


def _teller(view: View, run: int) -> Callable[[Progress], None]:
    return lambda progress: view.progress(Row(run, progress.worker), progress)
