"""Periodic averaging of a model's weights, beside torch's own and one bare all-reduce of as many bytes.

    python benchmarks/averaging.py
    python benchmarks/averaging.py --workers 3 --seconds 60 --json averaging.json
    python benchmarks/averaging.py --workers 4 --link 1gbit

100 M fp32 parameters in the shapes of a transformer, workers on this machine over gloo and loopback; with --link each
on a host of its own, a network namespace, which takes root or user namespaces, and iproute2. The bare all-reduce has
one flat tensor and nothing to divide, pack or put back: what no averaging can do without. Contestants take turns round
by round, so that whatever else the machine does meets all of them; a time is that of the slowest worker, a ratio the
median of the rounds' own. Extra memory is a worker's peak above what it held before, the highest of all workers, from
rounds of their own with free memory handed back first. Needs torch and laconic on the path, nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import gc
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from processes import free_port
from ratios import machine
from torch import nn
from torch.distributed.algorithms.model_averaging import utils as theirs

from laconic.algorithms.model_averaging import utils as ours
from laconic.algorithms.model_averaging.averagers import PeriodicModelAverager

BARE = "bare all-reduce"
MEMORY_ROUNDS = 2


def shapes() -> list[tuple[int, ...]]:
    """A GPT of 13 layers, width 768, a vocabulary of 10,000 and a tied head: 160 tensors, 100.0 M parameters."""
    width = 768
    found: list[tuple[int, ...]] = [(10_000, width), (256, width)]
    for _ in range(13):
        found += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        found += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [*found, (width,), (width,)]


class Weights(nn.Module):
    """Parameters that are trained, and nothing else. Each has a gradient, for torch leaves out those that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.full(shape, float(dist.get_rank()))) for shape in shapes()])
        for p in self.all:
            p.grad = torch.zeros(()).expand(p.shape)  # takes no memory


def contestants() -> dict[str, Callable[[], None]]:
    """What each does in a round. torch's averager moves its parameters to other memory: it has a model of its own."""
    model, torchs = Weights(), Weights()
    flat = torch.ones(sum(p.numel() for p in model.parameters()))
    averager = PeriodicModelAverager(period=2)

    def periodic() -> None:
        averager.step = 0  # a step at which it averages
        averager.average_parameters(model.parameters())

    return {
        BARE: lambda: dist.all_reduce(flat),
        "torch average_parameters": lambda: theirs.average_parameters(torchs.parameters(), None),
        "laconic average_parameters": lambda: ours.average_parameters(model.parameters(), None),
        "laconic PeriodicModelAverager": periodic,
    }


def timed(action: Callable[[], None]) -> float:
    """Seconds of one round, from when all workers are ready."""
    dist.barrier()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def extra_bytes(action: Callable[[], None]) -> float:
    """Peak of resident memory above the level before, or NaN where the system does not tell (it takes Linux)."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    except OSError:
        action()
        return float("nan")
    before = resident("VmRSS")
    action()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def measure(actions: dict[str, Callable[[], None]], seconds: float) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of every round and peak extra bytes, for each contestant, as this worker saw them."""
    for action in actions.values():
        timed(action)  # connections, threads, the first agreement
    extra = {name: max(extra_bytes(action) for _ in range(MEMORY_ROUNDS)) for name, action in actions.items()}
    times: dict[str, list[float]] = {name: [] for name in actions}
    end = time.monotonic() + seconds
    while all_agree(time.monotonic() < end or len(times[BARE]) < 3):
        for name, action in actions.items():
            times[name].append(timed(action))
    return times, extra


def all_agree(go_on: bool) -> bool:
    vote = torch.tensor([float(go_on)])
    dist.all_reduce(vote, op=dist.ReduceOp.MIN)
    return bool(vote)


def of_all_workers(times: dict[str, list[float]], extra: dict[str, float]) -> list[dict[str, Any]]:
    """One row a contestant: the slowest worker's seconds, the hungriest worker's memory."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (times, extra))
    slowest = {name: [max(each) for each in zip(*(t[name] for t, _ in everyone), strict=True)] for name in times}
    return [
        {
            "workers": dist.get_world_size(),
            "contestant": name,
            "seconds": statistics.median(slowest[name]),
            "ratio": statistics.median(s / bare for s, bare in zip(slowest[name], slowest[BARE], strict=True)),
            "extra_bytes": max(e[name] for _, e in everyone),
            "rounds": len(slowest[name]),
        }
        for name in times
    ]


def run(worker: int, workers: int, port: int, seconds: float, path: str | None, hosts: Any) -> None:
    logging.disable(logging.WARNING)
    address = "127.0.0.1"
    if hosts is not None:
        from laconic.tools.launch.namespaces import enter

        enter(hosts, worker)
        address = os.environ["MASTER_ADDR"]
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=worker,
        world_size=workers,
        timeout=datetime.timedelta(seconds=300),
    )
    rows = of_all_workers(*measure(contestants(), seconds))
    if worker == 0:
        show(rows)
        if path is not None:
            Path(path).write_text(json.dumps([*json.loads(Path(path).read_text()), *rows], indent=1))
    dist.barrier()
    os._exit(0)  # gloo's threads may let go of their last tensors late, which aborts an interpreter on its way out


def show(rows: list[dict[str, Any]]) -> None:
    print(f"\n{rows[0]['workers']} workers, {rows[0]['rounds']} rounds")
    print(f"{'':<32} {'seconds':>8} {'x bare':>7} {'extra MB':>9}")
    for row in rows:
        extra = row["extra_bytes"] / 1e6
        print(f"{row['contestant']:<32} {row['seconds']:>8.3f} {row['ratio']:>7.2f} {extra:>9.1f}", flush=True)


@contextlib.contextmanager
def network(text: str | None, workers: int) -> Iterator[Any]:
    """Make hosts that are joined as the text says, or none without one."""
    if text is None:
        yield None
        return
    from laconic.tools.launch.links import link, slow_link

    with slow_link(link(text, workers)) as made:
        yield made.hosts


def head(link: str | None) -> str:
    numels = [torch.Size(shape).numel() for shape in shapes()]
    return (
        f"{machine()}\n"
        f"{sum(numels) / 1e6:.1f} M fp32 parameters in {len(numels)} tensors, gloo over {link or 'loopback'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--seconds", type=float, default=35, help="how long to take turns, for each number of workers")
    parser.add_argument("--link", help="a host for each worker, joined like this: 1gbit, or 2 @ 1gbit, 2 @ 100mbit")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    print(head(options.link), flush=True)
    if options.json is not None:
        Path(options.json).write_text("[]")
    for workers in options.workers:
        port = free_port()
        with network(options.link, workers) as hosts:
            mp.spawn(run, (workers, port, options.seconds, options.json, hosts), nprocs=workers)


if __name__ == "__main__":
    main()
