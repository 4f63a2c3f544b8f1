"""What a step costs in which nothing is sent: Python time that laconic adds to `optimizer.step()`.

    python benchmarks/silence.py [--json ratios.json]

An optimizer with one tiny parameter steps many times, with and without a plan that never comes to its turn; medians of
blocks taken in turns, so that drift cancels. Bare and under DDP, over gloo with one other worker that does the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from processes import free_port
from ratios import write
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic

PLANS = [
    "post_local_sgd(period=1000000)",
    "diloco(period=1000000)",
    "hierarchical_sgd({500000: 1, 1000000: 2})",
    "streaming_diloco(period=1000000, fragments=2, delay=1)",
    "qsr(growth=1000.0, floor=1000000)",
]
BLOCK, BLOCKS = 200, 40


def seconds_a_step(optimizer: torch.optim.Optimizer) -> float:
    start = time.perf_counter()
    for _ in range(BLOCK):
        optimizer.step()
    return (time.perf_counter() - start) / BLOCK


def added(text: str, wrapped: bool) -> tuple[float, float]:
    """Microseconds that the plan adds to a step, and how many times as long it is."""
    modules = [nn.ParameterList([torch.zeros(1), torch.zeros(1)]) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in modules]
    model: nn.Module = DDP(modules[1]) if wrapped else modules[1]
    with laconic.attach(laconic.plan(text), model, optimizers[1]):
        pairs = [(seconds_a_step(optimizers[0]), seconds_a_step(optimizers[1])) for _ in range(BLOCKS)]
    ratio = statistics.median(with_ / without for without, with_ in pairs)
    return 1e6 * statistics.median(with_ - without for without, with_ in pairs), ratio


def run(worker: int, port: int, path: str | None) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=worker, world_size=2)
    if worker == 0:
        print(f"torch {torch.__version__}, {os.cpu_count()} cores; microseconds that a plan adds to such a step")
        print(f"{'plan':<58} {'bare':>6} {'DDP':>6}")
    ratios = {}
    for text in PLANS:
        (bare, ratio), (ddp, ratio_ddp) = added(text, wrapped=False), added(text, wrapped=True)
        ratios |= {f"{text}, bare": ratio, f"{text}, DDP": ratio_ddp}
        if worker == 0:
            print(f"{text:<58} {bare:>6.1f} {ddp:>6.1f}", flush=True)
    if worker == 0:
        write(path, ratios)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the ratios to this file")
    options = parser.parse_args()
    found = free_port()
    mp.spawn(run, (found, options.json), nprocs=2)
