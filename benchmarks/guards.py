"""What the checks cost in a step without faults: the lab's GPT with all of them, and with none.

    python benchmarks/guards.py [--workers 4] [--plans "ddp()" "post_local_sgd(period=16)"]
    python benchmarks/guards.py --parts       # one process: what a step takes, and each check of it

Three copies of the training in one set of processes, one with and two without, take turns step by step, so that
whatever else the machine does meets all. With: headers, digests of the weights, finite gradients and weights, stopping
by signal, waits in slices. Without: none of it but the waits. The cost is the ratio of the medians, of steps or, for
local methods, of stretches of 16; beside it that of the two without, which is how much of it means nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.digests import digests
from laconic.lab.settings import Settings
from laconic.lab.tasks import loss_of, make_task
from laconic.wires.wire import all_finite

WARM_UP, STEPS = 8, 320


class Training:
    """The lab's GPT under a plan, with all checks or none."""

    def __init__(self, plan: str, checked: bool, worker: int, workers: int) -> None:
        self.task = make_task(Settings(plan=plan, workers=workers))
        self.model = DDP(self.task.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        options = {} if checked else {"nonfinite": "ignore", "verify_every": 0}
        self.talk = laconic.attach(laconic.plan(plan), self.model, self.optimizer, **options)  # type: ignore[arg-type]
        if checked:
            self.talk.stop_on(signal.SIGTERM)
        self.worker = worker
        self.seconds: list[float] = []

    def step(self, number: int) -> None:
        batch = self.task.draw(self.worker, number)
        dist.barrier()
        begun = time.perf_counter()
        loss_of(self.model, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - begun)


def usual(training: Training) -> float:
    """The median of a stretch in which there is one round."""
    length = 16 if training.talk.plan.local else 1
    sums = [sum(training.seconds[i : i + length]) for i in range(0, STEPS, length)]
    return statistics.median(sums) / length


def run(worker: int, options: argparse.Namespace, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=worker, world_size=options.workers)
    if worker == 0:
        print(f"torch {torch.__version__}, {os.cpu_count()} cores, {options.workers} workers, the lab's GPT")
    for plan in options.plans:
        trainings = [Training(plan, checked, worker, options.workers) for checked in (False, True, False)]
        for number in range(1, WARM_UP + STEPS + 1):
            first = number % 3
            for each in (*trainings[first:], *trainings[:first]):
                each.step(number)
        for each in trainings:
            each.talk.detach()
            del each.seconds[:WARM_UP]
        if worker == 0:
            without, with_, again = (usual(each) for each in trainings)
            cost, nothing = 100 * (2 * with_ / (without + again) - 1), 100 * (again / without - 1)
            print(f"{plan:<28} {1e3 * without:7.1f} ms a step, {cost:+.2f}%; two without: {nothing:+.2f}%", flush=True)
    dist.destroy_process_group()


def lower_quartile_ms(action: Callable[[], object], times: int = 60) -> float:
    action()
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        action()
        found.append(time.perf_counter() - begun)
    return 1e3 * statistics.quantiles(found, n=4)[0]


def parts() -> None:
    """Each check by itself, where a whole run is too noisy to show it."""
    torch.set_num_threads(1)
    task = make_task(Settings(plan="ddp()", workers=1))
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-3)
    weights = {name: p.detach() for name, p in task.model.named_parameters()}
    bucket = torch.cat([p.reshape(-1) for p in weights.values()])

    def step() -> None:
        loss_of(task.model, task.draw(0, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    print(f"torch {torch.__version__}, one thread, the lab's GPT; milliseconds")
    print(f"a step {lower_quartile_ms(step, 30):.1f}")
    print(f"finite gradients, own and mean {2 * lower_quartile_ms(lambda: all_finite({'': bucket})):.2f} a step")
    print(f"finite weights {lower_quartile_ms(lambda: all_finite(weights)):.2f} a round of weights")
    print(f"digest of the weights {lower_quartile_ms(lambda: digests(weights)):.2f} a comparison")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--plans", nargs="+", default=["ddp()", "power_sgd(rank=4)", "post_local_sgd(period=16)"])
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()
    if options.parts:
        parts()
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run, (options, port), nprocs=options.workers)


if __name__ == "__main__":
    main()
