"""Runs trainings one after another and shows them: what `train` and `compare` have in common."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from laconic.cli.results import check_writable, write_json
from laconic.cli.view import Row, SilentView, View, make_view
from laconic.lab.launch import check_port, launch
from laconic.lab.progress import Progress, following, progress_file
from laconic.lab.settings import LabError, Place, Settings, check_workers, found_place, usable_cores
from laconic.lab.tasks import check_data
from laconic.lab.training import Outcome, start_group, train

DEFAULT_WORKERS = 4


@dataclass(frozen=True)
class Surroundings:
    """What a command was told beside the runs themselves."""

    port: int
    oversubscribe: bool
    json: Path | None
    plain: bool


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


def run_all(runs: Sequence[Settings], around: Surroundings, labels: Mapping[Row, str]) -> None:
    """Checks everything that can be checked, trains each run, shows the results and writes them.

    `labels` says which workers of which runs are shown, and under what name.
    """
    place = found_place(os.environ)
    _check(runs[0], around, place)
    view = _view(place, labels, around.plain)
    view.start()
    try:
        outcomes = _in_place(runs, view) if place else _launched(runs, around.port, view, list(labels))
    finally:
        view.close()
    view.results(outcomes)
    if around.json is not None and (place is None or place.worker == 0):
        write_json(around.json, outcomes)


def _view(place: Place | None, labels: Mapping[Row, str], plain: bool) -> View:
    """Under torchrun, worker 0 alone speaks, and of itself alone."""
    if place is None:
        return make_view(labels, plain)
    if place.worker != 0:
        return SilentView()
    return make_view({row: label for row, label in labels.items() if row.worker == 0}, plain)


def _check(run: Settings, around: Surroundings, place: Place | None) -> None:
    """All runs of a command differ only in their plan, so the first stands for all."""
    if around.json is not None:
        check_writable(around.json)
    if place is None:
        check_port(around.port)
        if not around.oversubscribe:
            check_workers(run.workers, usable_cores())
    check_data(run)


def _launched(runs: Sequence[Settings], port: int, view: View, rows: Sequence[Row]) -> list[Outcome]:
    """Starts workers for each run, and follows the files of those that have a row."""
    outcomes = []
    for index, settings in enumerate(runs):
        with tempfile.TemporaryDirectory(prefix="laconic-") as name:
            files = [progress_file(Path(name), row.worker) for row in rows if row.run == index]
            with following(files, _teller(view, index)):
                outcome = launch(settings, Path(name), port)
        view.finish(outcome)
        outcomes.append(outcome)
    return outcomes


def _in_place(runs: Sequence[Settings], view: View) -> list[Outcome]:
    """Trains as the worker that torchrun has made of this process."""
    start_group()
    outcomes = []
    try:
        for index, settings in enumerate(runs):
            outcome = train(settings, _teller(view, index))
            view.finish(outcome)
            outcomes.append(outcome)
    finally:
        dist.destroy_process_group()
    return outcomes


def _teller(view: View, run: int) -> Callable[[Progress], None]:
    return lambda progress: view.progress(Row(run, progress.worker), progress)
