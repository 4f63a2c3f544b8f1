"""What the checks cost in a step without faults: the lab's GPT with all of them, and with none.

    python benchmarks/guards.py [--workers 4] [--plans "ddp()" "post_local_sgd(period=16)"]
    python benchmarks/guards.py --parts       # one process: what a step takes, and each check of it

In one run and one set of processes, blocks of steps with and without checks take turns, so that drift cancels. With:
headers, digests of the weights, finite gradients and weights, stopping by signal, waits in slices. Without: none of it
but the waits. The cost is the median over pairs of blocks.
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

BLOCK, PAIRS = 32, 12


def seconds_a_step(plan: str, checked: bool, worker: int, workers: int) -> float:
    task = make_task(Settings(plan=plan, workers=workers))
    model = DDP(task.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {} if checked else {"nonfinite": "ignore", "verify_every": 0}
    with laconic.attach(laconic.plan(plan), model, optimizer, **options) as talk:  # type: ignore[arg-type]
        if checked:
            talk.stop_on(signal.SIGTERM)
        begun = 0.0
        for step in range(1, BLOCK + 5):
            if step == 5:  # DDP has laid out its buckets
                dist.barrier()
                begun = time.perf_counter()
            loss_of(model, task.draw(worker, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - begun) / BLOCK


def run(worker: int, options: argparse.Namespace, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=worker, world_size=options.workers)
    if worker == 0:
        print(f"torch {torch.__version__}, {os.cpu_count()} cores, {options.workers} workers, the lab's GPT")
    for plan in options.plans:
        pairs = [
            (
                seconds_a_step(plan, False, worker, options.workers),
                seconds_a_step(plan, True, worker, options.workers),
            )
            for _ in range(PAIRS)
        ]
        ratios = sorted(with_ / without for without, with_ in pairs)
        if worker == 0:
            plain = 1e3 * statistics.median(without for without, _ in pairs)
            quartiles = f"{100 * (ratios[PAIRS // 4] - 1):+.1f}% to {100 * (ratios[-PAIRS // 4] - 1):+.1f}%"
            print(f"{plan:<28} {plain:7.1f} ms a step, {100 * (statistics.median(ratios) - 1):+.2f}% ({quartiles})")
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
