"""Four workers, one of which is four times slower: seconds to the same validation loss.

    python benchmarks/unequal_speeds.py [--seeds 0 1 2] [--own 0.9] [--seconds 45]

Each worker is a process that sleeps in its steps, so that a step takes 20 ms on three of them and 80 ms on the last,
whatever else the cores do. There are four kinds of data, one of which is a worker's own: the share --own of its shard
is of this kind, and the rest of the three others. The validation set has as much of each kind. Rounds take 1.28 s; in
the last rows 0.4 s, in which the workers take 16 steps in the mean, as they do in the first row.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import in_processes
from torch import Tensor, nn

import laconic

STEP_S, SLOWER, SLOW = 0.02, 4, 3
BATCH, WIDTH, KINDS = 32, 128, 4
ROUND_S, SHORT_S = 16 * STEP_S * SLOWER, 20 * STEP_S
TARGETS = (0.6, 0.5, 0.4)
"""Of the variance of what is predicted."""


@dataclass(frozen=True)
class Row:
    """What is compared: a plan, its workers, and the batch of the slow one."""

    name: str
    plan: str
    workers: int = 4
    weighted: bool = False
    slow_batch: int = BATCH
    round_s: float = ROUND_S

    def step_s(self, worker: int) -> float:
        """How long a step takes: a smaller batch takes less."""
        return STEP_S * (SLOWER * self.slow_batch / BATCH if worker == SLOW else 1)


QUARTER = BATCH // SLOWER
ROWS = [
    Row("by steps", "diloco(period=16)"),
    Row("by time, weighted by samples", f"diloco(every='{ROUND_S}s')", weighted=True),
    Row("by time, weighted by steps", f"diloco(every='{ROUND_S}s')"),
    Row("by steps, a quarter of the batch on the slow worker", "diloco(period=64)", weighted=True, slow_batch=QUARTER),
    Row("by steps, without the slow worker", "diloco(period=64)", workers=3),
    Row("a fast worker by itself", "alone()", workers=1),
    Row(
        "by time, weighted by samples, 16 steps a round", f"diloco(every='{SHORT_S}s')", weighted=True, round_s=SHORT_S
    ),
    Row(
        "a quarter of the batch, 20 steps a round",
        "diloco(period=20)",
        weighted=True,
        slow_batch=QUARTER,
        round_s=SHORT_S,
    ),
    Row("without the slow worker, 20 steps a round", "diloco(period=20)", workers=3, round_s=SHORT_S),
]


class Data:
    """The shard of a worker and the validation set; each kind has a place of its own and a teacher of its own."""

    def __init__(self, seed: int, worker: int, own: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.places = torch.randn(KINDS, 32, generator=generator)
        self.first = torch.randn(KINDS, 32, 8, generator=generator) / 32**0.5
        self.second = torch.randn(KINDS, 8, 1, generator=generator) / 8**0.5
        self.validation = self._drawn(4096, torch.ones(KINDS), generator)
        shares = torch.full((KINDS,), (1 - own) / (KINDS - 1))
        shares[worker] = own
        self._generator = torch.Generator().manual_seed(1000 * seed + worker)
        x, y = self._drawn(20_000, shares, self._generator)
        self.shard = x, y + 0.5 * torch.randn(y.shape, generator=self._generator)

    def _drawn(self, size: int, shares: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        kind = torch.multinomial(shares, size, replacement=True, generator=generator)
        x = torch.randn(size, 32, generator=generator)  # around the place of its kind
        outputs = torch.stack([torch.tanh(x @ a) @ b for a, b in zip(self.first, self.second, strict=True)])
        return x + self.places[kind], outputs[kind, torch.arange(size)]

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Draw a batch of the shard."""
        index = torch.randint(len(self.shard[0]), (size,), generator=self._generator)
        return self.shard[0][index], self.shard[1][index]

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Return the validation loss, as a share of the variance."""
        x, y = self.validation
        return float(F.mse_loss(model(x), y) / y.var())


def run(worker: int, port: int, results: Any, row: Row, seed: int, own: float, rounds: int) -> None:
    """Train as one worker; put what it has done, and worker 0 its validation losses."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=worker, world_size=row.workers)
    data = Data(seed, worker, own)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = row.slow_batch if worker == SLOW else BATCH
    curve: list[tuple[float, float]] = []
    done = 0
    with laconic.attach(row.plan, model, optimizer, weighted=row.weighted) as session:
        dist.barrier()
        began = step_began = time.perf_counter()
        while done < rounds:
            x, y = data.batch(batch)
            if row.weighted:
                session.weigh(len(x))
            F.mse_loss(model(x), y).backward()
            time.sleep(max(0.0, row.step_s(worker) - (time.perf_counter() - step_began)))
            optimizer.step()
            optimizer.zero_grad()
            step_began = time.perf_counter()
            if session.synced if row.workers > 1 else session.step % 64 == 0:
                done += 1
                if worker == 0:
                    curve.append((time.perf_counter() - began, data.loss(model)))
        results.put((worker, session.step, session.metrics()["wait_seconds"], time.perf_counter() - began, curve))
    dist.destroy_process_group()


def seconds_to(curve: list[tuple[float, float]], target: float) -> float:
    return next((seconds for seconds, loss in curve if loss <= target), math.inf)


def measure(row: Row, seed: int, own: float, seconds: float) -> tuple[list[tuple[float, float]], str]:
    """Run all workers of a row; return the curve, and the steps and the waiting of each worker."""
    found = sorted(in_processes(run, row.workers, row, seed, own, round(seconds / row.round_s)))
    steps = ", ".join(str(step) for _, step, *_ in found)
    waits = ", ".join(f"{waited / lasted:.0%}" for _, _, waited, lasted, _ in found)
    return found[0][-1], f"{steps} | {waits}"


def shown(values: list[float]) -> str:
    """Return the median, and the ends where there are several."""
    if math.inf in values:
        reached = sum(value < math.inf for value in values)
        return "never" if not reached else f"{reached} of {len(values)}"
    ends = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.1f}{ends}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--own", type=float, default=0.9, help="the share of a shard that is of its worker's kind")
    parser.add_argument("--seconds", type=float, default=45.0, help="how long each row trains")
    parser.add_argument("--rows", type=int, nargs="+", default=range(len(ROWS)), help="which rows, from 0")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores; {options}")
    columns = " | ".join(f"s to {target}" for target in TARGETS)
    print(f"| | {columns} | loss at the end | steps of the workers | share of the time that they waited |")
    print("|---|" + "---|" * (len(TARGETS) + 3), flush=True)
    for row in (ROWS[index] for index in options.rows):
        runs = [measure(row, seed, options.own, options.seconds) for seed in options.seeds]
        cells = [shown([seconds_to(curve, target) for curve, _ in runs]) for target in TARGETS]
        last = statistics.median(curve[-1][1] for curve, _ in runs)
        print(f"| {row.name} | {' | '.join(cells)} | {last:.3f} | {runs[0][1]} |", flush=True)


if __name__ == "__main__":
    main()
