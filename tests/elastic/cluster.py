"""Worker processes that tests kill, stop and start again, and what they log."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import signal
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import laconic
from laconic import elastic
from laconic.codecs.feedback import residuals_by_name
from laconic.data import ElasticSampler
from tests.elastic import read_history
from tests.elastic.replay import LR, SHAPES, Line, gradient, optimizer_of, replay
from tests.namespaces import move_to
from tests.workers import _context


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
    timeout_s: float = 2.0
    heartbeat_timeout_s: float = 0.8
    wait_s: float = 20.0
    step_s: float = 0.0
    faults: tuple[int, ...] = ()
    """Steps in which one of the workers kills itself, the first time that it comes to them."""
    folder: str | None = None
    save_every: int | None = None
    stop_at: int | None = None
    leave_at: int | None = None
    momentum: float = 0.5
    weighted: bool = False
    """Whether means are weighted; all workers count the same, so the replay is that of plain means."""
    samples: int = 0
    """The size of the dataset that an `ElasticSampler` deals, if any."""
    host: str | None = None
    """The network namespace of this worker."""
    store: tuple[str | None, str] = (None, "127.0.0.1")
    """The network namespace and the address of the store."""

    @property
    def end(self) -> Path:
        """A file that makes all workers stop, once it exists."""
        return Path(self.logs) / "end"


def work(job: Job) -> None:
    """Run a worker process to its end, and write a log of what it does."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if job.host is not None:
        move_to(job.host)
    os.environ["TMPDIR"], tempfile.tempdir = job.logs + "/tmp", None
    path = Path(job.logs) / f"{job.id}-{os.getpid()}.jsonl"
    logging.basicConfig(
        filename=path.with_suffix(".log"), level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    with path.open("a", buffering=1) as file:
        write_log(file, lambda log: train(job, log))
    os._exit(0)


def write_log(file: Any, job: Callable[[Any], None], **always: Any) -> None:
    """Run a job that logs JSON lines, and log its error. The process ends if there is one."""

    def log(**what: Any) -> None:
        file.write(json.dumps({**what, **always, "at": time.time()}) + "\n")

    try:
        job(log)
    except BaseException as error:
        log(error=type(error).__name__, text=str(error), trace=traceback.format_exc())
        os._exit(1)


def train(job: Job, log: Any) -> None:
    world = elastic.join(
        f"{job.store[1]}:{job.port}",
        id=job.id,
        least=job.least,
        expect=job.expect,
        heartbeat_timeout_s=job.heartbeat_timeout_s,
        wait_s=job.wait_s,
    )
    model = Line(1.0 if job.id == "0" else float(os.getpid()))  # the others receive the weights of the first
    optimizer = optimizer_of(model, job.momentum)
    session = laconic.attach(laconic.plan(job.plan), model, optimizer, timeout_s=job.timeout_s, weighted=job.weighted)

    generation = 0
    draws: Callable[[], dict[str, Any]] = dict
    if job.samples:
        draws = samples_of(ElasticSampler(job.samples, session, batch=1 + int(job.id) % 3))

    def committed(commit: elastic.Committed) -> None:
        log(commit=[commit.since, commit.step, list(commit.workers)], **held(model, session))
        die(commit.step, phase=2)

    def die(number: int, phase: int) -> None:
        """Kill this process if a fault is due: before the gradient of a step, after its mean, or at its commit."""
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
                grad = gradient(step.number, step.worker, step.workers)
                began = held(model, session) if run.generation != generation else {}
                generation = run.generation
                log(tried=[generation, step.number], moves=sums(-LR * grad), **began, **draws())
                die(step.number, phase=0)
                if step.number == job.stop_at or job.end.exists():
                    run.stop()
                if step.number == job.leave_at:
                    run.leave()
                if job.weighted:
                    session.weigh(3)
                (model.flat() * grad).sum().backward()
                time.sleep(job.step_s)
                optimizer.step()
                optimizer.zero_grad()
        ended = {"step": session.step, "members": list(run.members), "stopped": run.stopped}
        log(final=model.flat().tolist(), samples=asdict(run.samples), **ended, **held(model, session))


def samples_of(sampler: ElasticSampler) -> Callable[[], dict[str, Any]]:
    """Return what draws the samples of a step, for its line in the log."""
    reader = sampler.batches(ReadsAhead(sampler))
    return lambda: {"drew": next(reader), "of": sampler.size}


class ReadsAhead:
    """A loader that draws three batches more than it has handed out."""

    batch_size = None

    def __init__(self, sampler: ElasticSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        indices, waiting = iter(self.sampler), deque[list[int]]()
        while batch := list(islice(indices, self.sampler.batch)):
            waiting.append(batch)
            if len(waiting) > 3:
                yield waiting.popleft()
        yield from waiting


def sums(flat: torch.Tensor) -> list[float]:
    """Sum the numbers of each tensor, with different weights."""
    flat = flat * (1 + torch.arange(flat.numel()) % 7)
    return [part.sum().item() for part in flat.split([math.prod(shape) for shape in SHAPES])]


def held(model: Line, session: laconic.Session) -> dict[str, Any]:
    """Return what `read_history` compares: the state once all has arrived, and a digest of what all workers share."""
    saved = session.state_dict()
    anchor, whole = saved["anchor"], {name: p.detach().clone() for name, p in model.named_parameters()}
    # 1. The means in flight take effect, as in `WeightSync._move` with mix=None and an outer step of 1.
    for fragment in saved["in_flight"]:
        for mean in fragment["means"]:
            for name, delta in mean.items():
                whole[name] += anchor[name] - delta - fragment["sent"][name]
    # 2. Residuals are still to be sent: of weights as deltas, of gradients times the learning rate.
    for key, factor in (("weights", 1.0), ("gradient", LR)):
        for name, residual in residuals_by_name(saved["state"].get(key, {})).items():
            whole[name] -= factor * residual
    flat = torch.cat([whole[name].reshape(-1) for name, _ in model.named_parameters()])
    shared = anchor if anchor is not None else dict(model.named_parameters())
    digest = hashlib.sha256(b"".join(shared[name].detach().numpy().tobytes() for name in sorted(shared)))
    return {"state": sums(flat), "shared": digest.hexdigest()[:16]}


def host_store(pipe: Any, host: str | None, address: str, port: int) -> None:
    """Host the store, in a process that can be killed."""
    if host is not None:
        move_to(host)
    store = elastic.serve(port, address)
    pipe.send(store.port)
    while True:
        signal.pause()


@dataclass
class Cluster:
    """The worker processes of a test. A context manager: it ends all of them."""

    job: Job
    running: dict[str, Any] = field(default_factory=dict)
    started: list[Any] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)

    def __enter__(self) -> Cluster:
        self.host_store()
        return self

    def host_store(self) -> None:
        """Start the host of the store; again, at the port that it had."""
        here, there = _context.Pipe(duplex=False)
        self.host = _context.Process(target=host_store, args=(there, *self.job.store, self.job.port))
        self.host.start()
        there.close()
        assert here.poll(60), "the store did not start"
        self.job = replace(self.job, port=here.recv())
        here.close()

    def __exit__(self, *_: object) -> None:
        for process in [*self.started, self.host]:
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
            self.started.append(process)

    def kill_host(self) -> None:
        """Kill the host of the store, and wait until all workers have stopped."""
        self.host.kill()
        self.host.join()
        for id in list(self.stopped):
            self.send(id, signal.SIGCONT)
        self.wait(150)  # one that is about to join looks for the store twice for 30 s

    def send(self, id: str, number: signal.Signals) -> None:
        """Send a signal to a worker."""
        os.kill(self.running[id].pid, number)
        if number in (signal.SIGSTOP, signal.SIGCONT):
            (self.stopped.add if number == signal.SIGSTOP else self.stopped.discard)(id)

    def wait(self, timeout_s: float, *ids: str) -> None:
        """Wait until workers have ended, by default all."""
        until = time.monotonic() + timeout_s
        for id in ids or self.running:
            self.running[id].join(max(0.0, until - time.monotonic()))
            assert not self.running[id].is_alive(), f"worker {id} did not end within {timeout_s} s\n{self.tail()}"

    def wait_for_step(self, step: int, timeout_s: float = 60) -> None:
        """Wait until a step is committed."""
        self._wait_until(lambda: self.newest() >= step, timeout_s, f"step {step} was not committed")

    def wait_for_members(self, *ids: str, timeout_s: float = 60) -> None:
        """Wait until exactly these workers have committed a step."""
        self._wait_until(lambda: self.members() == list(ids), timeout_s, f"{ids} did not form a group")

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
        until = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < until, f"{otherwise} in {timeout_s} s\n{self.tail()}"
            time.sleep(0.02)

    def end(self, timeout_s: float = 60) -> None:
        """Make all workers stop after the next commit, and wait for them."""
        self.job.end.touch()
        self.wait(timeout_s)

    def wait_and_restart(self, timeout_s: float) -> None:
        """Wait until all workers have finished; until one has, start again those that kill themselves."""
        until = time.monotonic() + timeout_s
        while not any(process.exitcode == 0 for process in self.running.values()):
            assert time.monotonic() < until, f"no worker has finished in {timeout_s} s\n{self.tail()}"
            for id, process in list(self.running.items()):
                if process.exitcode == -signal.SIGKILL:
                    self.start(id)
            time.sleep(0.05)
        self.wait(60, *(id for id, process in self.running.items() if process.exitcode != -signal.SIGKILL))

    def lines(self) -> list[dict[str, Any]]:
        """Read the logs of all workers."""
        found = []
        for path in sorted(Path(self.job.logs).glob("*.jsonl")):
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # the last line of a killed process
                    found.append({"id": path.stem.split("-")[0], **json.loads(line)})
        return found

    def newest(self) -> int:
        """Return the newest committed step, from the last lines alone."""
        return max((step for step, _ in self._last_commits()), default=0)

    def members(self) -> list[str]:
        """Return the workers of the newest commit. The first of them sends its state to workers that join."""
        return max(self._last_commits(), default=(0, []))[1]

    def holders(self) -> list[str]:
        """Return the running workers that hold the newest commit in memory."""
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
                file.seek(max(0, path.stat().st_size - 20_000))  # the last line may be an error
                for line in file.read().splitlines():
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        found.append(tuple(json.loads(line)["commit"][1:]))
        return found

    def commits(self) -> list[tuple[int, int, list[str]]]:
        """Return the commits in their order. All workers must report the same ones."""
        found: dict[int, tuple[int, int, list[str]]] = {}
        for line in self.lines():
            if "commit" in line:
                since, step, workers = line["commit"]
                assert found.setdefault(step, (since, step, workers)) == (since, step, workers)
        in_order = [found[step] for step in sorted(found)]
        ends = [0, *(step for _, step, _ in in_order)]
        assert [since for since, _, _ in in_order] == ends[:-1], "every commit begins where the last one ended"
        return in_order

    def history(self, **rules: Any) -> read_history.History:
        """Check the history by the logs alone."""
        found = read_history.check(Path(self.job.logs), least=self.job.least, **rules)
        assert not found.wrong, "\n".join([*found.wrong[:10], self.tail()])
        return found

    def finals(self) -> dict[str, dict[str, Any]]:
        return {line["id"]: line for line in self.lines() if "final" in line}

    def errors(self) -> dict[str, dict[str, Any]]:
        return {line["id"]: line for line in self.lines() if "error" in line}

    def check_finals(self, *ids: str, momentum: float = 0.5) -> None:
        """Compare the final weights of workers with the replay of the commits."""
        finals, commits = self.finals(), self.commits()
        expected = replay(commits, momentum)
        assert set(ids) <= set(finals), self.tail()
        for id in ids:
            assert finals[id]["step"] == commits[-1][1]
            assert torch.equal(torch.tensor(finals[id]["final"], dtype=torch.float64), expected), id

    def warnings(self, id: str) -> list[str]:
        """Return what a worker logged at level WARNING and above: what is seen without any configuration."""
        logs = "".join(path.read_text() for path in Path(self.job.logs).glob(f"{id}-*.log"))
        return re.findall(r"^\S+ \S+ (?:WARNING|ERROR|CRITICAL) (.*)$", logs, re.MULTILINE)

    def tail(self) -> str:
        """Return the errors and the last lines of the logs, for a failed test."""
        logs = sorted(Path(self.job.logs).glob("*.log"), key=lambda path: path.stat().st_mtime)
        tails = (f"{path.name}:\n" + "\n".join(path.read_text().splitlines()[-12:]) for path in logs[-8:])
        return "\n".join([*(line["trace"] for line in self.errors().values()), *tails])
