"""What the checks cost in a step without faults: the lab's GPT with all of them, and with none.

    python benchmarks/guards.py [--workers 4] [--plans "ddp()" "post_local_sgd(period=16)"]
    python benchmarks/guards.py --parts       # one process: what a step takes, and each check of it

One training, whose checks are switched on for one stretch of every two, in random order: two trainings in one process
differ by a percent for reasons of their own, such as where their memory lies. With: headers, digests of the weights,
finite gradients and weights, stopping by signal. Without: none of it. A stretch is 16 steps, with the round of a local
method. The cost is the ratio of the medians; the interval holds 95% of those of resampled stretches.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from processes import free_port
from ratios import write
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.checks.digests import digests
from laconic.exchange import all_finite
from laconic.guard import Signs, largest
from laconic.tools.lab.tasks import Lab, loss_of, make_task

STRETCH, WARM_UP = 16, 32


class Training:
    """The lab's GPT under a plan, with checks that can be switched."""

    def __init__(self, plan: str, worker: int, workers: int) -> None:
        self.task = make_task(Lab())
        self.model = DDP(self.task.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.session = laconic.attach(laconic.plan(plan), self.model, self.optimizer)
        self.session.stop_on(signal.SIGTERM)
        self.worker = worker
        self.number = 0

    def switch(self, on: bool) -> None:
        """Check everything from the next step on, as by default and after `stop_on`, or nothing."""
        self.session.nonfinite = "skip" if on else "ignore"
        self.session.verify_every = None if on else 0
        if on:
            self.session.stop_on(signal.SIGTERM)
        else:
            self.session.stop_on(signal.SIGTERM, every_s=float("inf"))

    def stretch(self, steps: int) -> float:
        """Seconds that the steps took."""
        seconds = 0.0
        for _ in range(steps):
            self.number += 1
            batch = self.task.draw(self.worker, self.number)
            dist.barrier()
            begun = time.perf_counter()
            loss_of(self.model, batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            seconds += time.perf_counter() - begun
        return seconds


def cost(pairs: Sequence[tuple[float, float]]) -> float:
    """By how many per cent a stretch with checks is longer than one without."""
    return 100 * (statistics.median(pair[1] for pair in pairs) / statistics.median(pair[0] for pair in pairs) - 1)


def run(worker: int, options: argparse.Namespace, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=worker, world_size=options.workers)
    if worker == 0:
        print(f"torch {torch.__version__}, {os.cpu_count()} cores, {options.workers} workers, the lab's GPT")
    ratios = {}
    for plan in options.plans:
        chance = random.Random(0)  # the same on all workers
        training = Training(plan, worker, options.workers)
        training.stretch(WARM_UP)
        pairs = []
        for _ in range(options.steps // (2 * STRETCH)):
            seconds = {}
            for on in chance.sample([False, True], 2):
                training.switch(on)
                seconds[on] = training.stretch(STRETCH)
            pairs.append((seconds[False], seconds[True]))
        training.session.detach()
        ratios[plan] = 1 + cost(pairs) / 100
        if worker == 0:
            again = sorted(cost(chance.choices(pairs, k=len(pairs))) for _ in range(1000))
            step_ms = 1e3 * statistics.median(pair[0] for pair in pairs) / STRETCH
            print(
                f"{plan:<28} {step_ms:7.1f} ms a step, {cost(pairs):+.2f}% ({again[25]:+.2f} to {again[974]:+.2f})",
                flush=True,
            )
    if worker == 0:
        write(options.json, ratios)
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
    task = make_task(Lab())
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-3)
    weights = {name: p.detach() for name, p in task.model.named_parameters()}
    bucket = torch.cat([p.reshape(-1) for p in weights.values()])

    def step() -> None:
        loss_of(task.model, task.draw(0, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    print(f"torch {torch.__version__}, one thread, the lab's GPT; milliseconds")
    print(f"a step {lower_quartile_ms(step, 30):.1f}")
    print(f"finite gradients {lower_quartile_ms(lambda: all_finite({'': bucket})):.2f} a step")
    print(f"finite weights {lower_quartile_ms(lambda: all_finite(weights)):.2f} a round of weights")
    print(f"digest of the weights {lower_quartile_ms(lambda: digests(weights)):.2f} a comparison")
    largest_weights = {name: weights[name] for name in largest(weights)}
    sketch_ms = lower_quartile_ms(lambda: Signs().sketch(largest_weights, 0, bucket.device))
    signs = Signs()
    again_ms = lower_quartile_ms(lambda: signs.sketch(largest_weights, 0, bucket.device))
    print(f"a guard's sketch {again_ms:.2f}, its first {sketch_ms:.2f}; for noise in one of 16 to 32 local steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--plans", nargs="+", default=["ddp()", "power_sgd(rank=4, bits=None)", "post_local_sgd(period=16)"]
    )
    parser.add_argument("--steps", type=int, default=2400, help="for each plan, half of them with checks")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--json", help="write the ratios of steps with checks to steps without to this file")
    options = parser.parse_args()
    if options.parts:
        parts()
        return
    port = free_port()
    mp.spawn(run, (options, port), nprocs=options.workers)


if __name__ == "__main__":
    main()
