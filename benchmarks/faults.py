"""How soon all workers raise an error: after a mismatch at `attach`, and after a worker was killed.

    python benchmarks/faults.py [--workers 2 4] [--times 7]

A mismatch: the last worker attaches the lab's GPT with one difference, and all workers must raise `DisagreementError`.
The time is from the call of `attach` to the error of the slowest worker. A kill: one worker is killed during training,
each in turn, and all others must raise a `LostWorkerError` that names it. The time is from the signal to the error of
the slowest worker; a local method finds out at its next synchronisation. Both: median and worst. Beside a mismatch is
an `attach` of workers that agree.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
import torch.distributed as dist
from ratios import write
from torch import nn

import laconic
from laconic.tools.lab.tasks import Lab, loss_of, make_task

_context = multiprocessing.get_context("forkserver")

KILLED = ("ddp()", "power_sgd(rank=4, bits=None)", "post_local_sgd(period=8)")
STEPS = 10  # before a kill
AGREED = "nothing"


def other_order(model: nn.Module) -> None:
    modules = list(model._modules.items())
    model._modules.clear()
    model._modules.update(reversed(modules))


def other_dtype(model: nn.Module) -> None:
    first = next(model.parameters())
    first.data = first.data.double()


def other_shape(model: nn.Module) -> None:
    first = next(model.parameters())
    first.data = first.data[:-1]


MODELS = {"order": other_order, "dtype": other_dtype, "shape": other_shape}
PLANS = {"plan": laconic.power_sgd(rank=2), "seed": laconic.power_sgd(rank=4, seed=1)}


def init_group(worker: int, workers: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=worker, world_size=workers)


def attach_apart(worker: int, workers: int, store: str, times: int, pipe: Connection) -> None:
    """Send the time until the error, for each mismatch and repetition, and that of an `attach` without one."""
    init_group(worker, workers, store)
    for what in (AGREED, *MODELS, *PLANS):
        for _ in range(times):
            model, plan = make_task(Lab()).model, laconic.power_sgd(rank=4, bits=None)
            if worker == workers - 1:
                MODELS.get(what, lambda _: None)(model)
                plan = PLANS.get(what, plan)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            dist.barrier()
            begun = time.monotonic()
            try:
                session = laconic.attach(plan, model, optimizer)
            except laconic.DisagreementError as error:
                pipe.send((what, time.monotonic() - begun, str(error)))
            else:
                pipe.send((what, time.monotonic() - begun, ""))
                session.detach()
    dist.destroy_process_group()
    os._exit(0)


def train_until_lost(worker: int, workers: int, store: str, plan: str, pipe: Connection) -> None:
    """Send a message when training has begun, and the time and the missing workers when one was lost."""
    init_group(worker, workers, store)
    task = make_task(Lab())
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-3)
    session = laconic.attach(laconic.plan(plan), task.model, optimizer)
    try:
        while True:
            loss_of(task.model, task.draw(worker, session.step + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.step == STEPS:
                pipe.send("trains")
    except laconic.LostWorkerError as error:
        pipe.send((time.monotonic(), error.missing, str(error)))
    os._exit(0)


class Workers:
    """Worker processes, each with a pipe to this one. A context manager: it ends all of them."""

    def __init__(self, job: Callable[..., None], workers: int, *args: object) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.processes, self.pipes = [], []
        for worker in range(workers):
            here, there = _context.Pipe(duplex=False)
            given = (worker, workers, os.path.join(self._folder.name, "store"), *args, there)
            self.processes.append(_context.Process(target=job, args=given))
            self.processes[-1].start()
            there.close()
            self.pipes.append(here)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def mismatches(workers: int, times: int) -> dict[str, list[float]]:
    with Workers(attach_apart, workers, times) as started:
        rows = [[pipe.recv() for pipe in started.pipes] for _ in range(times * (1 + len(MODELS | PLANS)))]
    found: dict[str, list[float]] = {what: [] for what in (AGREED, *MODELS, *PLANS)}
    for row in rows:
        assert all((what == AGREED) != (f"worker {workers - 1} has" in text) for what, _, text in row), row
        found[row[0][0]].append(max(took for _, took, _ in row))
    return found


def killed(plan: str, workers: int, lost: int) -> float:
    with Workers(train_until_lost, workers, plan) as started:
        for pipe in started.pipes:
            message = pipe.recv()
            assert message == "trains", message
        time.sleep(0.3)
        at = time.monotonic()
        os.kill(started.processes[lost].pid or 0, signal.SIGKILL)
        ends = [pipe.recv() for worker, pipe in enumerate(started.pipes) if worker != lost]
    assert all(missing == [lost] for _, missing, _ in ends), ends
    return max(when for when, _, _ in ends) - at


def show(what: str, workers: int, seconds: list[float]) -> None:
    print(f"| {what} | {workers} | {statistics.median(seconds):.2f} s | {max(seconds):.2f} s |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--mismatches", action="store_true", help="only those at attach")
    parser.add_argument("--json", help="write the ratios of a mismatch to an attach that succeeds to this file")
    options = parser.parse_args()
    _context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "laconic"])
    load = os.getloadavg()[0]
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, load {load:.1f}, the lab's GPT, {options.times} times each"
    )
    print("| fault | workers | median | worst |\n|---|---|---|---|")
    ratios = {}
    for workers in options.workers:
        found = mismatches(workers, options.times)
        for what, seconds in found.items():
            show(f"another {what} at `attach`" if what != AGREED else "none at `attach`", workers, seconds)
            if what != AGREED:
                name = f"{workers} workers, another {what} at attach"
                ratios[name] = statistics.median(seconds) / statistics.median(found[AGREED])
    write(options.json, ratios)
    for plan in () if options.mismatches else KILLED:
        for workers in options.workers:
            show(f"killed under `{plan}`", workers, [killed(plan, workers, n % workers) for n in range(options.times)])


if __name__ == "__main__":
    main()
