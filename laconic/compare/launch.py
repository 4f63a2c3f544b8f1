"""Starts the workers of a run on this machine, through torch's elastic launcher, and never leaves one behind.

Four ways for a run to end early, and what then happens to its workers:

- a worker fails: the launcher stops the others, and `WorkerError` says which failed and with what words;
- a signal (Ctrl-C, SIGTERM, a closed terminal): `Stopped` rises through the launcher, which ends the
  workers;
- the launcher fails half-way through starting: the workers that it had started are ended here, by their
  handles;
- this process is killed outright: each worker waits on a pipe from it, and leaves when the pipe closes.
"""

import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from laconic.compare.lab.training import Outcome, start_group, train
from laconic.compare.links import Link
from laconic.compare.namespaces import Hosts, enter
from laconic.compare.progress import Tail
from laconic.compare.reporter import Reporter, progress_file, seconds_file
from laconic.compare.settings import LabError, Settings, usable_cores

HOST = "127.0.0.1"
LET_THE_CULPRIT_SPEAK_S = 0.5
START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
LAUNCHER_LOGS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
PRELOADED = ["laconic.compare.lab.training", "torch._dynamo"]  # the optimizer would import the second at its first step
STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class WorkerError(RuntimeError):
    """A worker failed. The message says which one, where, and its last words."""


class Stopped(BaseException):
    """A signal asked this process to stop. Not an `Exception`, so that nothing on the way swallows it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


@dataclass(frozen=True)
class Network:
    """What the workers of a run talk over: this machine's loopback, or hosts of their own, or a computed link.

    `port` is where the launcher meets its workers; 0 takes any free one.
    """

    port: int = 0
    hosts: Hosts | None = None
    computed: Link | None = None

    @property
    def clock(self) -> str:
        """What is known of the seconds: "measured", or "computed" as far as the link goes."""
        return "measured" if self.computed is None else "computed"


LOOPBACK = Network()


def launch(settings: Settings, folder: Path, network: Network = LOOPBACK) -> Outcome:
    """Runs `settings.workers` processes to the end and returns worker 0's outcome.

    `folder` takes their progress and their logs.
    """
    _warm_up()
    started_by_others = set(multiprocessing.active_children())
    try:
        outcomes = run_elastic(
            settings.workers, folder, network.port, _work, settings, str(folder), network, card_here()
        )
    except ChildFailedError as error:
        raise _worker_error(error, settings, folder) from None
    finally:
        for process in set(multiprocessing.active_children()) - started_by_others:
            process.kill()
            process.join()
    outcome: Outcome = outcomes[0]
    return outcome


def run_elastic(
    workers: int, folder: Path, port: int, program: Callable[..., object] | str, *arguments: object
) -> dict[int, Any]:
    """Runs a function, or a command, on each worker through torch's elastic launcher; returns what they returned."""
    check_port(port)
    # With the shared store, a second generation of workers reads the addresses of the first (pytorch#135712).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with _launcher_silenced():
        returned: dict[int, Any] = elastic_launch(_launch_config(workers, folder, port), program)(*arguments)
    return returned


def check_port(port: int) -> None:
    """Refuses a port that is taken; without this the launcher would wait on a stranger's server."""
    if not 0 <= port <= 65535:
        raise LabError(f"--port {port}: a port is between 1 and 65535. Leave out --port to take any free one.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise LabError(
                f"--port {port}: workers cannot meet there ({error.strerror}). "
                "Choose another, or leave out --port to take any free one."
            ) from error


@contextmanager
def stoppable() -> Iterator[None]:
    """Turns the signals that end a program into `Stopped`, once: repeats are ignored while it is obeyed."""
    numbers = [getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name)]

    def stop(number: int, frame: FrameType | None) -> None:
        for repeated in numbers:
            signal.signal(repeated, signal.SIG_IGN)
        raise Stopped(number)

    # nohup works by ignoring SIGHUP beforehand, and that wish is kept
    numbers = [n for n in numbers if signal.Signals(n).name != "SIGHUP" or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _launch_config(workers: int, folder: Path, port: int) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{HOST}:{port}",
        local_addr=HOST,
        max_restarts=0,
        monitor_interval=0.05,
        start_method=START_METHOD,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL),
        signals_to_handle="SIGQUIT",  # the others are `stoppable`'s: torch's exception could be swallowed
    )


def card_here() -> str | None:
    """The network card that workers talk over: the one asked for, else the loopback.

    The workers of one machine need no name lookup and no network, and a laptop's host name may lead nowhere.
    """
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return os.environ.get("GLOO_SOCKET_IFNAME", loopback[0] if loopback else None)


@contextmanager
def environment(changes: Mapping[str, str], workers: int, hosts: bool = False) -> Iterator[None]:
    """Change what workers on this machine are started with: each has its share of the cores, and the card of here.

    With `hosts` they have cards of their own.
    """
    before = dict(os.environ)
    os.environ.update(changes)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // workers)))
    card = card_here()
    if card is not None and not hosts:
        os.environ["GLOO_SOCKET_IFNAME"] = card
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _warm_up() -> None:
    """Imports torch once, in the server that workers are forked from, and not again in each of them.

    The first process waits for the imports, and a signal then finds a process that has nothing to clean up.
    """
    if START_METHOD == "forkserver":
        multiprocessing.set_forkserver_preload(PRELOADED)
        first = multiprocessing.get_context("forkserver").Process(target=_nothing)
        first.start()
        first.join()


def _nothing() -> None:
    """What the first process of a server does."""


@contextmanager
def _launcher_silenced() -> Iterator[None]:
    """What goes wrong is told once, by this module's errors, and not also by the launcher's own log."""
    known = logging.root.manager.loggerDict.items()
    loggers = [x for name, x in known if isinstance(x, logging.Logger) and name.startswith(LAUNCHER_LOGS)]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _work(settings: Settings, folder: str, network: Network, card: str | None) -> Outcome:
    """What runs in each worker process."""
    worker = int(os.environ["RANK"])
    if network.hosts is not None:
        enter(network.hosts, worker)
    elif card is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = card
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # on Ctrl-C a worker just ends; the main process does the talking
    _leave_with_parent()
    try:
        return _train_in_group(settings, Path(folder), worker, network.computed)
    except Exception as error:
        if _blames_another(error):
            time.sleep(LET_THE_CULPRIT_SPEAK_S)  # the launcher names the first to go: let that be the cause
        _last_words_file(Path(folder), worker).write_text(f"{type(error).__name__}: {error}")
        raise


def _train_in_group(settings: Settings, folder: Path, worker: int, computed: Link | None) -> Outcome:
    start_group()
    try:
        with (
            progress_file(folder, worker).open("w") as progress,
            seconds_file(folder, worker).open("wb", buffering=0) as seconds,
        ):
            return train(settings, Reporter(progress), computed, seconds)
    finally:
        dist.destroy_process_group()


def _blames_another(error: Exception) -> bool:
    text = str(error).lower()
    return any(words in text for words in ("connection closed", "connection reset", "broken pipe", "timed out"))


def _leave_with_parent() -> None:
    """Ends this worker when the process that launched it is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait_and_leave() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_and_leave, name="laconic-parent", daemon=True).start()


def _last_words_file(folder: Path, worker: int) -> Path:
    return folder / f"worker-{worker}.error"


def _worker_error(error: ChildFailedError, settings: Settings, folder: Path) -> WorkerError:
    worker, failure = error.get_first_failure()
    reports = Tail(progress_file(folder, worker)).news()
    when = f"after step {reports[-1].step} of {settings.steps}" if reports else "at start"
    return WorkerError(
        f"worker {worker} of {settings.workers} died {when}, with plan {settings.plan}: "
        f"{_last_words(failure, folder, worker)}. The other workers were stopped."
    )


def _last_words(failure: ProcessFailure, folder: Path, worker: int) -> str:
    path = _last_words_file(folder, worker)
    if path.exists():
        return " ".join(path.read_text().split()).rstrip(".")
    return killed_by(failure.exitcode)


def killed_by(exit_code: int) -> str:
    """How a process ended, in words.

    >>> killed_by(-9), killed_by(3)
    ('killed by SIGKILL', 'it left with exit code 3')
    """
    return f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"it left with exit code {exit_code}"
