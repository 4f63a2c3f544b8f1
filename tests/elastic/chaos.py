"""Workers that can be killed, stopped and started again, and the replay that tells what they should have computed.

Gradients are whole numbers that any number of workers up to six divides: their mean is exact in float64 in whatever
order it is summed, so the replay of the committed rounds must give the same bits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import laconic
from laconic import elastic
from tests.namespaces import move_to
from tests.workers import _context

SIDE = 8
DIVISIBLE = 60  # by 1 to 6


@dataclass(frozen=True)
class Job:
    """What a worker process does."""

    port: int
    logs: str
    total: int
    id: str = "0"
    plan: str = "ddp()"
    least: int = 2
    expect: int = 4
    timeout_s: float = 3.0
    silence_s: float = 1.0
    wait_s: float = 20.0
    step_s: float = 0.0
    faults: tuple[int, ...] = ()
    """Steps in which one of the workers kills itself, the first time that they come to it."""
    folder: str | None = None
    save_every: int | None = None
    stop_at: int | None = None
    momentum: float = 0.5
    host: str | None = None
    """The network namespace that this worker is in."""
    store: tuple[str | None, str] = (None, "127.0.0.1")
    """The network namespace and the address of the store."""

    @property
    def end(self) -> Path:
        """A file that lets all stop, once it is there."""
        return Path(self.logs) / "end"


class Line(nn.Module):
    """A matrix and a vector, whose gradient is the data."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((SIDE, SIDE), start, dtype=torch.float64))
        self.b = nn.Parameter(torch.full((SIDE,), start, dtype=torch.float64))

    def flat(self) -> Tensor:
        return torch.cat([self.w.reshape(-1), self.b])


def gradient(step: int, worker: int, workers: int) -> Tensor:
    """Make the data of a step, other for each step, worker and number of workers."""
    at = torch.arange(SIDE * SIDE + SIDE, dtype=torch.int64)
    mixed = (step * 1009 + worker * 7919 + workers * 104729 + at * 31) % 997
    return ((mixed - 498) * DIVISIBLE).double()


def optimizer_of(model: nn.Module, momentum: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=2**-10, momentum=momentum)


def replay(rounds: list[tuple[int, int, list[str]]], momentum: float = 0.5) -> Tensor:
    """Compute, without faults and in this process, what the committed rounds lead to.

    A round of one step averages gradients. One of several averages weights, after steps without momentum.
    """
    model = Line(1.0)
    optimizer = optimizer_of(model, momentum)
    for since, step, workers in rounds:
        assert step == since + 1 or momentum == 0
        n = len(workers)
        due = [gradient(number, worker, n) for number in range(since + 1, step + 1) for worker in range(n)]
        mean = torch.stack(due).sum(0) / n
        model.w.grad, model.b.grad = mean[: SIDE * SIDE].view(SIDE, SIDE), mean[SIDE * SIDE :]
        optimizer.step()
    return model.flat().detach()


def work(job: Job) -> None:
    """Run a worker process to its end, which is written to its log."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if job.host is not None:
        move_to(job.host)
    os.environ["TMPDIR"], tempfile.tempdir = job.logs + "/tmp", None
    path = Path(job.logs) / f"{job.id}-{os.getpid()}.jsonl"
    logging.basicConfig(filename=path.with_suffix(".log"), level=logging.INFO, format="%(asctime)s %(message)s")
    to_its_end(path, lambda say: train(job, say))


def to_its_end(path: Path, job: Callable[[Any], None]) -> None:
    """Run a job, which may say things, and end the process; what was said, and its error, are in the log."""
    with path.open("a", buffering=1) as log:

        def say(**what: Any) -> None:
            log.write(json.dumps({**what, "at": time.time()}) + "\n")

        try:
            job(say)
        except BaseException as error:
            say(error=type(error).__name__, text=str(error), trace=traceback.format_exc())
            os._exit(1)
    os._exit(0)


def train(job: Job, say: Any) -> None:
    world = elastic.join(
        f"{job.store[1]}:{job.port}",
        id=job.id,
        least=job.least,
        expect=job.expect,
        silence_s=job.silence_s,
        wait_s=job.wait_s,
    )
    model = Line(1.0 if job.id == "0" else float(os.getpid()))  # the others take over what the first has
    optimizer = optimizer_of(model, job.momentum)
    session = laconic.attach(laconic.plan(job.plan), model, optimizer, timeout_s=job.timeout_s)

    def committed(done: elastic.Committed) -> None:
        say(commit=[done.since, done.step, list(done.workers)])
        die(done.step, phase=2)

    def die(number: int, phase: int) -> None:
        """Kill the process, if it is its turn: before a step's gradient, after its mean, or when it is committed."""
        if number in job.faults and number % 3 == phase and run.worker == number % run.workers:
            with contextlib.suppress(FileExistsError):
                (Path(job.logs) / f"fault-{number}").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)

    optimizer.register_step_post_hook(lambda *_: die(session.step + 1, phase=1))
    with elastic.Run(
        world, session, model, optimizer, folder=job.folder, save_every=job.save_every, on_commit=committed
    ) as run:
        for step in run.steps(job.total):
            with step:
                say(tried=[run._history.generation, step.number])
                die(step.number, phase=0)
                if step.number == job.stop_at or job.end.exists():
                    run.stop()
                (model.flat() * gradient(step.number, step.worker, step.workers)).sum().backward()
                time.sleep(job.step_s)
                optimizer.step()
                optimizer.zero_grad()
        say(final=model.flat().tolist(), step=session.step, members=list(run.members), stopped=run.stopped)


def hold_store(pipe: Any, host: str | None, address: str) -> None:
    """Host the store, in a process that can be killed."""
    if host is not None:
        move_to(host)
    store = elastic.serve(0, address)
    pipe.send(store.port)
    while True:
        signal.pause()


def held() -> tuple[set[str], set[str]]:
    """List the processes that tests have started and that are there, and on which sockets they or this one listen."""
    server = str(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
    started, sockets, listening = set(), set(), set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # one that has just ended
            if stat.read_text().rpartition(")")[2].split()[1] == server:
                started.add(stat.parent.name)
    for process in (str(os.getpid()), server, *started):
        for link in Path(f"/proc/{process}/fd").glob("*"):
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(link))
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A":
                listening.add(f"socket:[{fields[9]}]")
    return started, sockets & listening


@dataclass
class Crowd:
    """The worker processes of a test. A context manager: none is left behind."""

    job: Job
    running: dict[str, Any] = field(default_factory=dict)
    everyone: list[Any] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)

    def __enter__(self) -> Crowd:
        here, there = _context.Pipe(duplex=False)
        self.host = _context.Process(target=hold_store, args=(there, *self.job.store))
        self.host.start()
        there.close()
        assert here.poll(60), "the store's host did not come up"
        self.job = replace(self.job, port=here.recv())
        here.close()
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.everyone, self.host]:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()

    def start(self, *ids: str, **changes: Any) -> None:
        """Start worker processes."""
        for id in ids:
            process = _context.Process(target=work, args=(replace(self.job, id=id, **changes),))
            process.start()
            self.running[id] = process
            self.everyone.append(process)

    def send(self, id: str, number: signal.Signals) -> None:
        """Send a signal to a worker."""
        os.kill(self.running[id].pid, number)
        if number in (signal.SIGSTOP, signal.SIGCONT):
            (self.stopped.add if number == signal.SIGSTOP else self.stopped.discard)(id)

    def wait(self, timeout_s: float, *ids: str) -> None:
        """Wait for workers to end, by default all that run."""
        until = time.monotonic() + timeout_s
        for id in ids or self.running:
            self.running[id].join(max(0.0, until - time.monotonic()))
            assert not self.running[id].is_alive(), f"worker {id} did not end within {timeout_s} s\n{self.tail()}"

    def wait_for_step(self, step: int, timeout_s: float = 60) -> None:
        """Wait until a step is committed."""
        until = time.monotonic() + timeout_s
        while self.newest() < step:
            assert time.monotonic() < until, f"step {step} was not committed in {timeout_s} s\n{self.tail()}"
            time.sleep(0.02)

    def wait_for_members(self, *ids: str, timeout_s: float = 60) -> None:
        """Wait until a round of exactly these workers is committed."""
        until = time.monotonic() + timeout_s
        while self.members() != list(ids):
            assert time.monotonic() < until, f"{ids} did not come together in {timeout_s} s\n{self.tail()}"
            time.sleep(0.02)

    def end(self, timeout_s: float = 60) -> None:
        """Let all stop, after the next round, and wait for it."""
        self.job.end.touch()
        self.wait(timeout_s)

    def lines(self) -> list[dict[str, Any]]:
        """Read all that the workers have written."""
        found = []
        for path in sorted(Path(self.job.logs).glob("*.jsonl")):
            for line in path.read_text().splitlines():
                try:
                    found.append({"id": path.stem.split("-")[0], **json.loads(line)})
                except json.JSONDecodeError:  # a killed process's last line
                    continue
        return found

    def newest(self) -> int:
        """Find the newest committed step, from the last lines alone."""
        return max((step for step, _ in self._last_commits()), default=0)

    def members(self) -> list[str]:
        """Tell who took part in the newest committed round. The first of them hands its state to those who join."""
        return max(self._last_commits(), default=(0, []))[1]

    def holders(self) -> list[str]:
        """List the workers that run, and whose process of now has the newest committed round in its memory."""
        newest = self.newest()
        awake = [id for id, process in self.running.items() if process.exitcode is None and id not in self.stopped]
        return [
            id
            for id in awake
            if any(step >= newest - 1 for step, _ in self._last_commits(f"{id}-{self.running[id].pid}"))
        ]

    def _last_commits(self, whose: str = "*") -> list[tuple[int, list[str]]]:
        found = []
        for path in Path(self.job.logs).glob(f"{whose}.jsonl"):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 2000))
                for line in file.read().splitlines():
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        found.append(tuple(json.loads(line)["commit"][1:]))
        return found

    def commits(self) -> list[tuple[int, int, list[str]]]:
        """List the committed rounds, each of which every worker must tell of alike."""
        rounds: dict[int, tuple[int, int, list[str]]] = {}
        for line in self.lines():
            if "commit" in line:
                since, step, workers = line["commit"]
                assert rounds.setdefault(step, (since, step, workers)) == (since, step, workers)
        in_order = [rounds[step] for step in sorted(rounds)]
        ends = [0, *(step for _, step, _ in in_order)]
        assert [since for since, _, _ in in_order] == ends[:-1], "every committed round begins where the last one ended"
        return in_order

    def finals(self) -> dict[str, dict[str, Any]]:
        return {line["id"]: line for line in self.lines() if "final" in line}

    def errors(self) -> dict[str, dict[str, Any]]:
        return {line["id"]: line for line in self.lines() if "error" in line}

    def tail(self) -> str:
        logs = sorted(Path(self.job.logs).glob("*.log"), key=lambda path: path.stat().st_mtime)
        tails = (f"{path.name}:\n" + "\n".join(path.read_text().splitlines()[-12:]) for path in logs[-8:])
        return "\n".join([*(line["trace"] for line in self.errors().values()), *tails])
