"""How much memory plans need at their peak, above `ddp()`: a table for docs/start.md.

    python benchmarks/memory.py [--layers 24 48] [--plans "ddp()" "power_sgd(rank=32)"]

Each run has two workers of its own over gloo on the CPU, which train a DDP model of 1024 x 4096 matrices for ten steps.
What is measured is the largest resident memory of worker 0, less that under `ddp()`, in copies of the weights in fp32.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from processes import in_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic

PLANS = (
    *("alone()", "post_local_sgd(period=2)", "power_sgd(rank=32)", "quantized_ddp()", "diloco(period=2)"),
    *("streaming_diloco(period=4)", "sparse_loco(period=2)", "diloco(period=2, momentum=0.9)", "demo()"),
)
WIDTH, STEPS = 1024, 10


def work(worker: int, port: int, results: Any, layers: int, text: str) -> None:
    """Train; worker 0 puts the bytes of the weights and its largest resident memory."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=worker, world_size=2)
    pairs = [(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(layers // 8)]
    model = nn.Sequential(*(each for pair in pairs for each in pair))
    net = DDP(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if text.startswith("demo"):
        optimizer = laconic.optim.DeMo(model.parameters(), lr=1e-3)
    with laconic.attach(laconic.plan(text), net, optimizer):
        for _ in range(STEPS):
            x = torch.randn(8, WIDTH)
            (net(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if worker == 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            results.put((sum(p.nbytes for p in model.parameters()), peak))
        dist.barrier()
    dist.destroy_process_group()


def measured(layers: int, text: str) -> tuple[int, int]:
    """Run two workers; return the bytes of the weights and the largest resident memory."""
    found: tuple[int, int]
    [found] = in_processes(work, 2, layers, text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[24, 48], help="eight are 32 MiB of weights")
    parser.add_argument("--plans", nargs="+", default=PLANS)
    options = parser.parse_args()
    for layers in options.layers:
        weights, base = measured(layers, "ddp()")
        print(f"{weights / 2**20:.0f} MiB of weights; ddp(): {base / 2**20:.0f} MiB", flush=True)
        for text in options.plans:
            _, peak = measured(layers, text)
            print(f"  {text}: {(peak - base) / weights:+.1f} copies", flush=True)


if __name__ == "__main__":
    main()
