"""What a step costs under the plans that people use, beside torch's DDP and beside a step that sends nothing.

    python benchmarks/step_cost.py                                   # 0.1, 2 and 12 M parameters, 2 workers: 4 minutes
    python benchmarks/step_cost.py --workers 4 --models 0.1M --plans "ddp()" "power_sgd()"

A multilayer perceptron with little arithmetic trains over loopback, one thread a worker, so that what is left is what
the host does. Each contestant has processes of its own, in `--turns` turns; a turn counts with the median of its steps,
a contestant with the median of its turns. All but "bare" wrap the model in DDP.

    ms           a step
    of DDP       beside torch's DDP in the same run
    collectives  that the ledger counts, in a step, headers and digests included
    in them      milliseconds from the launch of each to its end, added up (several run at a time)
    main, other  milliseconds of the processor: in the thread that trains, and in all others (the queue's, gloo's)
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
import torch.distributed as dist
from processes import in_processes
from ratios import write
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic

BARE, TORCH = "bare", "torch's DDP"
PLANS = (
    *("ddp()", "quantized_ddp()", "power_sgd()", "frugal('60x')", "frugal('120x', delay=1)"),
    "diloco()",
)
WIDTHS = {"0.1M": 128, "2M": 720, "12M": 1760}
"""The width of the four square matrices, for each model."""
WARM_UP, STEPS = 20, {"0.1M": 200, "2M": 60, "12M": 30}
BATCH = 4


@dataclass(frozen=True)
class Cost:
    """What a step costs one worker in one turn; times in milliseconds, the last four in the mean over steps."""

    step: float
    collectives: float = 0.0
    in_collectives: float = 0.0
    main: float = 0.0
    other: float = 0.0


def train(contestant: str, name: str) -> Cost:
    """Train a contestant's model in this process group."""
    torch.manual_seed(0)
    width = WIDTHS[name]
    inside = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())))
    model: nn.Module = inside if contestant == BARE else DDP(inside)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session = None if contestant in (BARE, TORCH) else laconic.attach(contestant, model, optimizer)
    x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    steps, seconds = STEPS[name], []
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            dist.barrier()
            main, process = time.thread_time(), time.process_time()
        begun = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
    main, process = time.thread_time() - main, time.process_time() - process
    count = spent = 0.0
    if session is not None:
        entries = [each for each in session.ledger.entries if each.step > WARM_UP]
        count, spent = len(entries), sum(each.seconds for each in entries)
        session.detach()
    each = 1e3 / steps
    median = 1e3 * statistics.median(seconds[WARM_UP:])
    # Of a plan that synchronises in some steps, the mean over its period is what a step costs.
    step_ms = max(median, each * sum(seconds[WARM_UP:])) if session and session.plan.local else median
    return Cost(step_ms, count / steps, each * spent, each * main, each * (process - main))


def run(worker: int, port: int, results: Any, workers: int, contestant: str, name: str) -> None:
    """One worker of one turn."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=worker, world_size=workers)
    found = train(contestant, name)
    dist.barrier()
    if worker == 0:
        results.put(found)
    dist.destroy_process_group()


def turn(contestant: str, name: str, workers: int) -> Cost:
    """Measure a contestant once, in processes of its own."""
    found: Cost
    [found] = in_processes(run, workers, workers, contestant, name)
    return found


def median_of(costs: Sequence[Cost]) -> Cost:
    """The turn whose step is the median."""
    return sorted(costs, key=lambda cost: cost.step)[len(costs) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=list(WIDTHS), default=list(WIDTHS))
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", help="write the ratios to torch's DDP to this file")
    options = parser.parse_args()
    contestants = [BARE, TORCH, *options.plans]
    ratios = {}
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {options.workers} workers, one thread each")
    for name in options.models:
        turns: dict[str, list[Cost]] = {each: [] for each in contestants}
        for _ in range(options.turns):
            for each in contestants:
                turns[each].append(turn(each, name, options.workers))
        found = {each: median_of(costs) for each, costs in turns.items()}
        print(f"\n{name:<26} {'ms':>8} {'of DDP':>7} {'collectives':>12} {'in them':>8} {'main':>7} {'other':>7}")
        for each, cost in found.items():
            ratio = cost.step / found[TORCH].step
            print(
                f"{each:<26} {cost.step:>8.2f} {ratio:>7.2f} {cost.collectives:>12.1f} {cost.in_collectives:>8.2f} "
                f"{cost.main:>7.2f} {cost.other:>7.2f}",
                flush=True,
            )
            if each not in (BARE, TORCH):
                ratios[f"{name}, {each}"] = ratio
    write(options.json, ratios)


if __name__ == "__main__":
    main()
