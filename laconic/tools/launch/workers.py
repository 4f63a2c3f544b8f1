"""Starts the workers of a run on this machine, as torchrun would, and ends them in every case.

- A worker fails: the others are stopped, and `WorkerError` (output.py) names the worker and its error.
- A signal (Ctrl-C, SIGTERM, a closed terminal): `Stopped` passes through `started`, which ends the workers.
- This process is killed: on Linux, the kernel ends the workers (`namespaces.die_with_parent`).

Their files are in a temporary folder, which is also removed after a process that was killed: it has a file that its
owner keeps locked, and the kernel releases the lock when the owner ends. Each new run removes this user's folders whose
lock is free, and ends the processes of their workers that still run.

    with run_folder() as folder:
        run_workers(python("train.py"), 4, folder, title="the training")
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from uuid import uuid4

from laconic.tools.errors import UsageError, check_count
from laconic.tools.launch.links import PROGRAM, Link, SlowLink
from laconic.tools.launch.namespaces import Hosts
from laconic.tools.launch.output import killed_by, worker_error, worker_file
from laconic.tools.machine import usable_cores

if sys.platform != "win32":  # where a locked file cannot be renamed, and no folder is removed later
    import fcntl

LOOPBACK = "127.0.0.1"
HOST_PORT = "29500"  # of worker 0 on a host of its own, where every port is free
DEFAULT_WORKERS = 4
MOST_WORKERS = 16  # on any machine; more need more cores
WORKERS_PER_CORE = 4
POLL_S, GRACE_S = 0.05, 10.0
STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")

PREFIX = "laconic-run-"
LOCK = "owner.lock"
RUN_VARIABLE = "LACONIC_RUN_FOLDER"
"""The environment variable that workers, and the processes that they start, have from the run that started them."""

logger = logging.getLogger(__name__)


class Stopped(BaseException):
    """A signal asked this process to stop. Not an `Exception`, so that no handler for those catches it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


@dataclass(frozen=True)
class WorkerNetwork:
    """The network of a run: the loopback interface, a real slow link, or a link whose time is computed."""

    slow: SlowLink | None = None
    computed: Link | None = None

    @property
    def link(self) -> Link | None:
        """The link, real or computed."""
        return self.computed if self.slow is None else self.slow.link

    @property
    def hosts(self) -> Hosts | None:
        """The hosts of a real link."""
        return None if self.slow is None else self.slow.hosts

    @property
    def clock(self) -> str:
        """Whether the seconds of the link are "measured" or "computed"."""
        return "measured" if self.computed is None else "computed"

    def uplink_bytes(self) -> dict[str, int]:
        """The bytes that each group of a real link has sent to the others so far."""
        return {} if self.slow is None else self.slow.uplink_bytes()


class Worker:
    """The process of a worker. Its output goes to files in a folder; the kernel kills it when this process ends."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], folder: Path, hosts: Hosts | None = None
    ) -> None:
        self.rank = int(environ["RANK"])
        place = json.dumps(None if hosts is None else asdict(hosts))
        entered = [sys.executable, str(PROGRAM), "enter", place, *command]
        stdout, stderr = (worker_file(folder, self.rank, stream) for stream in ("stdout", "stderr"))
        with stdout.open("wb") as out, stderr.open("wb") as err:
            # in a session of its own: a signal reaches this process alone, which then ends the worker with its children
            self._popen = subprocess.Popen(
                entered, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )

    @property
    def exit_code(self) -> int | None:
        """The exit code, or the negative number of the signal; None while the worker runs."""
        if self._popen.returncode is None and hasattr(os, "waitid"):
            # it stays a zombie until `close`, so that its id is not used again while children of it may run
            ended = os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return None if ended is None else ended.si_status * (1 if ended.si_code == os.CLD_EXITED else -1)
        return self._popen.poll()

    def send(self, number: int) -> None:
        """Send a signal to the worker and its children, also to those that have outlived it."""
        if self._popen.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # macOS refuses a group of zombies
                os.killpg(self._popen.pid, number)

    def wait(self) -> int:
        """Wait for the end; return the exit code."""
        while (code := self.exit_code) is None:
            time.sleep(POLL_S)
        return code

    def close(self) -> None:
        """Kill the worker and its children, if any still runs."""
        self.send(signal.SIGKILL)
        self._popen.wait()


def run_workers(
    command: Sequence[str],
    workers: int,
    folder: Path,
    network: WorkerNetwork | None = None,
    *,
    title: str,
    variables: Mapping[str, str] | None = None,
    reached: Callable[[int], str] = lambda worker: "",
    has_ended: Callable[[int], bool] = lambda worker: False,
) -> None:
    """Run a command on each worker to its end. Their output is in `folder` (`output.read_log`).

    If one fails, the others are stopped, and `WorkerError` says "worker 1 of 4 of {title} failed{reached(1)}: ...".
    If a signal ended a worker, and all workers `has_ended` what they were started for, it is only logged: a thread of
    gloo may abort an interpreter that shuts down (torch 2.13): "terminate called without an active exception".
    """
    failed, codes = dict[int, int](), dict[int, int | None]()
    with started(command, workers, folder, network, variables) as running:
        while not failed and any(worker.exit_code is None for worker in running):
            time.sleep(POLL_S)
            codes = {worker.rank: worker.exit_code for worker in running}
            failed = {rank: code for rank, code in codes.items() if code}
    if not failed:
        return
    if all(code < 0 for code in failed.values()) and all(map(has_ended, range(workers))):
        first = next(iter(failed))
        logger.warning(
            "%s: worker %d was %s after its end; its results are used.", title, first, killed_by(failed[first])
        )
        return
    ended = [rank for rank, code in codes.items() if code == 0 or (code is None and has_ended(rank))]
    raise worker_error(folder, workers, failed, title, {worker: reached(worker) for worker in range(workers)}, ended)


@contextmanager
def started(
    command: Sequence[str],
    workers: int,
    folder: Path,
    network: WorkerNetwork | None = None,
    variables: Mapping[str, str] | None = None,
    grace_s: float = GRACE_S,
) -> Iterator[list[Worker]]:
    """Start a command on each worker; at the end of the block, end those that still run, after `grace_s` by force."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch takes a second or more

    hosts = None if network is None else network.hosts
    store, running, run_id = None, [], uuid4().hex
    if hosts is None:  # it outlives the workers, as torchrun's does; on hosts, worker 0 opens one
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    try:
        for rank in range(workers):
            environ = worker_environ(rank, workers, None if store is None else store.port)
            environ |= {"TORCHELASTIC_RUN_ID": run_id, RUN_VARIABLE: str(folder), **(variables or {})}
            running.append(Worker(command, environ, folder, hosts))
        yield running
    finally:
        deadline = time.monotonic() + grace_s
        for worker in running if grace_s else ():
            worker.send(signal.SIGTERM)
        while time.monotonic() < deadline and any(worker.exit_code is None for worker in running):
            time.sleep(POLL_S)
        for worker in running:
            worker.close()


def worker_environ(rank: int, workers: int, port: int | None) -> dict[str, str]:
    """The environment of a worker on this machine: torchrun's variables, its share of the cores, the loopback.

    The loopback needs no name lookup. A GLOO_SOCKET_IFNAME that is set already stays. Without the port of a store, the
    worker is on a host of its own, and enters it with the interface of that host.
    """
    given = {"OMP_NUM_THREADS": str(max(1, usable_cores() // workers))}
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback and port is not None:
        given["GLOO_SOCKET_IFNAME"] = loopback[0]
    return {
        **given,
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "ROLE_WORLD_SIZE": str(workers),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": HOST_PORT if port is None else str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": str(port is not None),
    }


def python(*arguments: str) -> list[str]:
    """The command of a Python that imports laconic from where this process did."""
    option = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    return [sys.executable, *option, *arguments]


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


@dataclass(frozen=True)
class Place:
    """The rank of this process among the workers that a launcher such as torchrun started."""

    worker: int
    workers: int


def found_place(environ: Mapping[str, str]) -> Place | None:
    """Read the place of this process from torchrun's variables; None if it is not a worker.

    >>> found_place({"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    Place(worker=2, workers=4)
    >>> found_place({"RANK": "2"}) is None
    True
    """
    if not all(name in environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    return Place(worker=int(environ["RANK"]), workers=int(environ["WORLD_SIZE"]))


def workers_here(given: int | None) -> int:
    """The number of workers: torchrun's if it started this process, else the given one, else four."""
    check_count("workers", given)
    place = found_place(os.environ)
    if place is None:
        return DEFAULT_WORKERS if given is None else given
    if given not in (None, place.workers):
        raise UsageError(
            f"--workers {given}: torchrun has already started {place.workers}. "
            f"Leave out --workers, or give torchrun --nproc-per-node {given}."
        )
    return place.workers


def check_workers(workers: int, cores: int) -> None:
    """Refuse more workers than the cores can serve.

    >>> check_workers(workers=16, cores=2)
    >>> check_workers(workers=500, cores=2)
    Traceback (most recent call last):
    laconic.tools.errors.UsageError: --workers 500: this machine has 2 usable cores, and ...
    """
    most = max(MOST_WORKERS, WORKERS_PER_CORE * cores)
    if workers > most:
        raise UsageError(
            f"--workers {workers}: this machine has {cores} usable core{'s' * (cores != 1)}, and more than "
            f"{most} workers would mostly wait for one another. Use --workers {most} or fewer, or laconic simulate."
        )


@contextmanager
def run_folder() -> Iterator[Path]:
    """Make a folder, and remove it at the end of the block. If this process is killed, the next run removes it."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        if sys.platform == "win32":
            yield Path(name)
        else:
            remove_abandoned(Path(tempfile.gettempdir()))
            # lock the file before it has the name that other processes look for
            new = Path(name, f"{LOCK}.new")
            with new.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                new.rename(Path(name, LOCK))
                yield Path(name)


def remove_abandoned(place: Path) -> None:
    """Remove the folders in `place` that processes of this user left behind, and end what their workers left behind.

    The kernel kills a worker whose launcher was killed, but not the processes that the worker has started.
    """
    if sys.platform == "win32":
        return
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with (folder / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _end_processes(folder)
                shutil.rmtree(folder, ignore_errors=True)


def _end_processes(folder: Path) -> None:
    wanted = f"{RUN_VARIABLE}={folder}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # of another user, or ended
            if wanted in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)
