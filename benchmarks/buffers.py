"""What to do with BatchNorm's statistics when weights are averaged now and then: average, the leader's, or keep.

    python benchmarks/buffers.py

A small convolutional net with BatchNorm learns to tell four patterns in noise, on 4 workers. "alike": all see the same
kind of images; "unlike": each worker's are brighter or darker than the others', as data from different sites is. The
loss is that of every worker's own model, statistics and all, on images of all kinds, averaged over the workers.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from processes import free_port
from torch import Tensor, nn
from torch.nn import functional as F

import laconic

WORKERS, STEPS, PERIOD, SEEDS = 4, 160, 16, (0, 1, 2)


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 16, 4),
    )  # fmt: skip


def images(generator: torch.Generator, count: int, site: int | None, unlike: bool) -> tuple[Tensor, Tensor]:
    patterns = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(0, 4, (count,), generator=generator)
    noise = 1.5 * torch.randn(count, 1, 8, 8, generator=generator)
    sites = torch.randint(0, WORKERS, (count,), generator=generator) if site is None else torch.full((count,), site)
    shift = (sites.float() - (WORKERS - 1) / 2) * (1.0 if unlike else 0.0)
    return patterns[labels] + noise + shift.view(-1, 1, 1, 1), labels


def final_loss(worker: int, policy: str, unlike: bool, seed: int) -> float:
    model = net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plan = laconic.post_local_sgd(period=PERIOD, buffers=policy)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(100 * seed + worker)
    with laconic.attach(plan, model, optimizer):
        for _ in range(STEPS):
            x, y = images(generator, 16, worker, unlike)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        x, y = images(torch.Generator().manual_seed(9), 2000, None, unlike)
        loss = F.cross_entropy(model(x), y)
    dist.all_reduce(loss)
    return float(loss) / WORKERS


def run(worker: int, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=worker, world_size=WORKERS)
    if worker == 0:
        print(f"torch {torch.__version__}; {WORKERS} workers, {STEPS} steps, period {PERIOD}, seeds {SEEDS}\n")
        print("| buffers | alike | unlike |\n|---|---|---|")
    for policy in ("average", "leader", "keep"):
        losses = [statistics.mean(final_loss(worker, policy, unlike, s) for s in SEEDS) for unlike in (False, True)]
        if worker == 0:
            print(f'| `"{policy}"` | {losses[0]:.3f} | {losses[1]:.3f} |', flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    found = free_port()
    mp.spawn(run, (found,), nprocs=WORKERS)
