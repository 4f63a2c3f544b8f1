"""Every peer beside laconic: the same training over the same real links (network namespaces: root or user namespaces).

    pip install -c constraints.txt -e ".[bench]"
    python benchmarks/peers.py --json peers.json --png peers.png

Each contestant trains the lab's GPT with the defaults of `laconic compare` on 4 hosts until a validation loss: the same
data, seed, batch, optimizer and learning-rate schedule, one training loop (contestants/worker.py). Seconds are of
training, without start-up and validation; bytes are those that the network interface counted, per worker. A contestant
that fails, or is not installed, is a row with its message. The command runs every contestant once on each link, in
under 40 minutes on 2 cores; if it was stopped, the same command with the same --json goes on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from contestants import tables
from contestants.contract import Contestant
from contestants.listed import CONTESTANTS, named
from contestants.tables import Run
from contestants.worker import POINTS, Goal, Point

from laconic.errors import PlanError
from laconic.tools.launch.links import SlowLink, slow_link
from laconic.tools.launch.links import link as parse_link
from laconic.tools.launch.output import WorkerError
from laconic.tools.launch.workers import Stopped, WorkerNetwork, python, run_folder, run_workers, stoppable

WORKER = Path(__file__).parent / "contestants" / "worker.py"
UNTIL_LOSS = 2.08  # as in docs/compare.md
STEPS = 300  # the learning rate follows them, as in `laconic compare`
STARTUP_S = 120.0  # at most, before and after training; then the run is stopped
QUICK = ("alone", "torchft LocalSGD, 64", "frugal(bytes='120x', delay=1)")


class OutOfTime(BaseException):
    """A run took too long. Not an `Exception`, so that no handler for those catches it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=["10mbit", "100mbit"])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument(
        "--contestants", nargs="+", metavar="NAME", help="default: all but those that --list calls swept; any plan, too"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--until-loss", type=float, default=UNTIL_LOSS)
    parser.add_argument(
        "--json", type=Path, help="write every run here after it ends; runs that are in it are not repeated"
    )
    parser.add_argument("--png", type=Path)
    parser.add_argument("--sweep", action="store_true", help="also the settings that were tried and are not the best")
    parser.add_argument(
        "--quick", action="store_true", help="the best of each kind at 10mbit, in under 2 minutes: ratios"
    )
    parser.add_argument("--list", action="store_true", help="print each contestant with its settings")
    given = parser.parse_args()
    chosen = list(QUICK) if given.quick else given.contestants
    try:
        contestants = [named(name) for name in chosen or ()]
    except PlanError as error:
        raise SystemExit(f"--contestants: {error} --list prints the contestants; any plan is one, too.") from None
    contestants = contestants or [c for c in CONTESTANTS if given.sweep or not c.swept]
    if given.list:
        print("\n".join(f"{c.name:32} {c.kind:8} {c.settings}{' (swept)' * c.swept}" for c in contestants))
        return
    links = given.links[:1] if given.quick else given.links
    try:
        with stoppable():
            runs = run_all(contestants, links, given)
    except Stopped as stopped:
        raise SystemExit(f"stopped by {stopped}; the same command with the same --json goes on") from None
    print(tables.ratios(runs) if given.quick else tables.page(runs, given.until_loss))
    if given.png is not None:
        tables.draw(runs, given.until_loss, given.png)


def run_all(contestants: list[Contestant], links: list[str], given: argparse.Namespace) -> list[Run]:
    """Run each contestant on each link with each seed, one after the other, and keep what has been run."""
    file: Path | None = given.json
    known = [] if file is None or not file.exists() else tables.read(file)
    done: list[Run] = []
    for link in links:
        for contestant in contestants:
            for seed in given.seeds:
                goal = Goal(contestant.name, seed, STEPS, contestant.seconds, given.until_loss)
                like = [run for run in known if (run.link, run.goal) == (link, goal)]
                done.append(like[0] if like else run_one(contestant, goal, link, given.hosts))
                print(tables.line(done[-1]), file=sys.stderr, flush=True)
                if file is not None:
                    others = [run for run in known if run not in done]
                    file.write_text(json.dumps([asdict(run) for run in (*others, *done)], indent=1) + "\n")
    return done


def run_one(contestant: Contestant, goal: Goal, link: str, hosts: int) -> Run:
    """Run one contestant over a link. What it has reached is kept if it fails or takes too long."""
    if importlib.util.find_spec(contestant.needs) is None:
        return Run(link, goal, contestant.kind, contestant.settings, (), f"not installed: {contestant.needs}", 0.0)
    began, error = time.perf_counter(), ""
    with run_folder() as folder, slow_link(parse_link(link, hosts)) as slow:
        try:
            with at_most(goal.seconds + STARTUP_S):
                launch(goal, folder, slow, hosts)
        except OutOfTime:
            error = f"stopped after {goal.seconds + STARTUP_S:.0f} s"
        except WorkerError as failed:
            error = failed.reason
        points = read_points(folder)
    if points and points[-1].ended:
        error = ""  # it failed after the end of its training
    wall_s = time.perf_counter() - began
    return Run(link, goal, contestant.kind, contestant.settings, tuple(points), error, wall_s)


def read_points(folder: Path) -> list[Point]:
    """The validations of a run so far."""
    file = folder / POINTS
    return [Point(**json.loads(text)) for text in file.read_text().splitlines()] if file.exists() else []


def launch(goal: Goal, folder: Path, slow: SlowLink | None, workers: int) -> None:
    """Start the workers and wait for them. Without a slow link they use the loopback interface."""
    command = python(str(WORKER), str(folder), json.dumps(asdict(goal)))
    run_workers(command, workers, folder, WorkerNetwork(slow), title=goal.name)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` if the block takes longer. The launcher then ends the workers."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    main()
