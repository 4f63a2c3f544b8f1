"""Starts the workers of a run on this machine, with torch's elastic launcher, and ends them in every case.

- A worker fails: the launcher stops the others, and `WorkerError` (failures.py) names the worker and its error.
- A signal (Ctrl-C, SIGTERM, a closed terminal): `Stopped` passes through the launcher, which ends the workers.
- This process is killed: on Linux, the kernel ends the workers (`namespaces.die_with_parent`).
"""

import json
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from laconic.session import observers
from laconic.tools.compare.records import Outcome, read_outcome
from laconic.tools.compare.reporter import FOLDER, write_goal
from laconic.tools.compare.settings import LabError, Run, usable_cores
from laconic.tools.launch.failures import aborted_after_end, killed_by, worker_error
from laconic.tools.launch.links import Link
from laconic.tools.launch.slow_link import PROGRAM, SlowLink

LOOPBACK = "127.0.0.1"
REPORTER = "laconic.tools.compare.reporter:from_env"
STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")

logger = logging.getLogger(__name__)


class Stopped(BaseException):
    """A signal asked this process to stop. Not an `Exception`, so that no handler for those catches it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


@dataclass(frozen=True)
class Network:
    """The network of a run: the loopback interface, a real slow link, or a link whose time is computed.

    `port` is the launcher's; 0 takes any free one.
    """

    port: int = 0
    slow: SlowLink | None = None
    computed: Link | None = None

    @property
    def link(self) -> Link | None:
        """The link, real or computed."""
        return self.computed if self.slow is None else self.slow.link

    @property
    def clock(self) -> str:
        """Whether the seconds of the link are "measured" or "computed"."""
        return "measured" if self.computed is None else "computed"

    def uplink_bytes(self) -> dict[str, int]:
        """The bytes that each group of a real link has sent to the others so far."""
        return {} if self.slow is None else self.slow.uplink_bytes()


def launch(run: Run, folder: Path, network: Network | None = None) -> Outcome:
    """Run all workers to the end and return the outcome. Their progress and their logs go to `folder`."""
    network = network or Network()
    write_goal(folder, run.goal, network.computed)
    hosts = json.dumps(None if network.slow is None else asdict(network.slow.hosts))
    command = (str(PROGRAM), "enter", hosts, *run.command(folder))
    try:
        with environment(report_variables(run, folder), run.workers, hosts=network.slow is not None):
            run_elastic(run.workers, folder, network.port, sys.executable, *command)
    except ChildFailedError as error:
        first, _ = error.get_first_failure()
        codes = {worker: error.failures[worker].exitcode for worker in (first, *error.failures)}
        if not aborted_after_end(run, folder, codes):
            raise worker_error(run, folder, codes) from None
        logger.warning(
            "%s: worker %d was %s after its end; its results are used.", run.title, first, killed_by(codes[first])
        )
    return read_outcome(run, folder)


def report_variables(run: Run, folder: Path) -> dict[str, str]:
    """The environment variables that give a script its plan and let it report to `folder`."""
    others = os.environ.get(observers.VARIABLE)
    named = REPORTER if others is None else f"{others},{REPORTER}"
    return {"LACONIC_PLAN": run.plan, FOLDER: str(folder), observers.VARIABLE: named}


def run_elastic(workers: int, folder: Path, port: int, program: str, *arguments: str) -> None:
    """Run a command on each worker with torch's elastic launcher, to its end."""
    check_port(port)
    # With the shared store, a second generation of workers reads the addresses of the first (pytorch#135712).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:{port}",
        local_addr=LOOPBACK,
        max_restarts=0,
        monitor_interval=0.05,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL),
        signals_to_handle="SIGQUIT",  # `stoppable` handles the others
    )
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # the launcher logs the failures that are raised
    try:
        elastic_launch(config, program)(*arguments)
    finally:
        logging.disable(before)


def check_port(port: int) -> None:
    """Refuse a port that is in use, at which the launcher would wait for another program's server."""
    if not 0 <= port <= 65535:
        raise LabError(f"--port {port}: a port is between 1 and 65535. Leave out --port to take any free one.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise LabError(
                f"--port {port}: workers cannot meet there ({error.strerror}). "
                "Choose another, or leave out --port to take any free one."
            ) from error


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise `Stopped` at the first signal that ends a program; ignore further ones while it is handled."""
    numbers = [getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name)]
    # nohup ignores SIGHUP before the program starts: keep it so
    numbers = [n for n in numbers if signal.Signals(n).name != "SIGHUP" or signal.getsignal(n) != signal.SIG_IGN]

    def stop(number: int, frame: FrameType | None) -> None:
        for repeated in numbers:
            signal.signal(repeated, signal.SIG_IGN)
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def variables(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and restore the environment at the end of the block."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def environment(changes: Mapping[str, str], workers: int, hosts: bool = False) -> AbstractContextManager[None]:
    """Set the environment of workers on this machine: each has its share of the cores, and they use the loopback.

    The loopback needs no name lookup. A GLOO_SOCKET_IFNAME that is set already stays; with `hosts`, workers set it.
    """
    given = {"OMP_NUM_THREADS": str(max(1, usable_cores() // workers))}
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback and not hosts:
        given["GLOO_SOCKET_IFNAME"] = loopback[0]
    return variables({**given, **os.environ, **changes})
