"""What a session costs with many workers on one machine: attach, one round and detach, beside torch's own of each.

    python benchmarks/scale.py
    python benchmarks/scale.py --workers 16 --json ratios.json

A tiny model on gloo over loopback, far more workers than cores. Each part has a peer in the same processes:

    attach    dist.new_group(): gloo connects every worker with every other
    a round   the same training step on a model without laconic, then one dist.all_reduce of as many bytes
    detach    dist.destroy_process_group() of that group

Ours and the peer's alternate; a time is that of the slowest worker, and the median of the repetitions. "store" is how
many calls a worker makes to the store that the processes share (`check` is left out: while a collective takes long,
each worker looks at one key every 0.25 s). "collectives" and "bytes" are what a worker starts and gives to them.
"packets" are those of all workers at the interface, with one barrier, for which root gives the run a network namespace
of its own. "MB" is the memory of a worker that it does not share with others, over what it had before.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a namespace of its own has no names for addresses

import torch
import torch._dynamo  # optimizers import it at their first step: once here, and not in each worker
import torch.distributed as dist
from processes import free_port
from ratios import machine, write
from torch import nn

import laconic
from tests.counting import CountedCollectives, CountingStore

PLANS = ["ddp()", "power_sgd()", "post_local_sgd(period=1)"]
PARTS = ["attach", "round", "detach"]
WIDTH, ROUNDS, TIMES = 128, 5, 3
CLONE_NEWNET = 0x40000000

_context = multiprocessing.get_context("fork")  # torch is imported once, and shared


@dataclass
class Costs:
    """What one part cost one worker, in each of its repetitions."""

    seconds: list[float] = field(default_factory=list)
    store: list[int] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    payload_bytes: list[int] = field(default_factory=list)
    packets: list[int] = field(default_factory=list)
    private_bytes: list[int] = field(default_factory=list)


class Meter:
    """Measures parts of the work of one worker."""

    def __init__(self, store: CountingStore) -> None:
        self.store, self.collectives = store, CountedCollectives()
        self.costs: dict[str, Costs] = {}

    def measure(self, name: str, part: Callable[[], Any]) -> Any:
        """Run a part on all workers together, and note what it costs."""
        costs = self.costs.setdefault(name, Costs())
        dist.barrier()
        memory, packets = private_bytes(), packets_sent()
        self.store.calls.clear()
        self.collectives.take()
        start = time.perf_counter()
        result = part()
        costs.seconds.append(time.perf_counter() - start)
        calls = Counter({name: count for name, count in self.store.calls.items() if name != "check"})
        collectives, payload = self.collectives.take()
        dist.barrier()
        costs.store.append(calls.total())
        costs.collectives.append(collectives.total())
        costs.payload_bytes.append(payload.total())
        costs.packets.append(packets_sent() - packets)
        costs.private_bytes.append(private_bytes() - memory)
        return result


def private_bytes() -> int:
    """Memory of this process alone: pages that it shares with the process it was forked from do not count."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def resident_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[1])


def packets_sent() -> int:
    """Packets that the loopback interface of this network namespace has sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[9]) for line in lines if line.strip().startswith("lo:"))


class Training:
    """A model, its optimizer, and one step of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self) -> None:
        self.model(torch.ones(4, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def ours(meter: Meter, plan: str) -> int:
    """Attach, train, detach; return the bytes that a round gives to collectives."""
    training = Training()
    session = meter.measure(
        f"{plan} attach", lambda: laconic.attach(laconic.plan(plan), training.model, training.optimizer)
    )
    for _ in range(ROUNDS):
        meter.measure(f"{plan} round", training.step)
    meter.measure(f"{plan} detach", session.detach)
    return meter.costs[f"{plan} round"].payload_bytes[-1]


def peers(meter: Meter, plan: str, size_bytes: int) -> None:
    training, x = Training(), torch.zeros(size_bytes // 4)
    groups = [meter.measure(f"{plan} attach, peer", dist.new_group)]

    def step() -> None:
        training.step()
        dist.all_reduce(x, group=groups[0])

    for _ in range(ROUNDS):
        meter.measure(f"{plan} round, peer", step)
    # Connections are closed when the last reference goes.
    meter.measure(f"{plan} detach, peer", lambda: dist.destroy_process_group(groups.pop()))


def work(worker: int, workers: int, port: int, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    memory = [resident_bytes()]
    own = dist.TCPStore("127.0.0.1", port, workers, worker == 0, timedelta(seconds=300), wait_for_workers=False)
    store = CountingStore(own)
    dist.init_process_group("gloo", store=store, rank=worker, world_size=workers)
    Training().step()
    dist.barrier()
    memory.append(resident_bytes())
    meter = Meter(store)
    for plan in PLANS:
        size_bytes = ours(meter, plan)  # the first time takes buffers and threads into use
        peers(meter, plan, size_bytes)
    meter.costs.clear()
    for _ in range(TIMES):
        for plan in PLANS:
            size_bytes = ours(meter, plan)
            peers(meter, plan, size_bytes)
    memory.append(resident_bytes())
    pipe.send((memory, meter.costs))
    pipe.close()
    own.add("ended", 1)
    while worker == 0 and own.add("ended", 0) < workers:  # its store is the others', too
        time.sleep(0.05)
    os._exit(0)


def run(workers: int) -> list[tuple[list[int], dict[str, Costs]]]:
    """Run all workers, and return what each has measured."""
    port = free_port()
    processes, pipes = [], []
    for worker in range(workers):
        here, there = _context.Pipe(duplex=False)
        processes.append(_context.Process(target=work, args=(worker, workers, port, there)))
        processes[-1].start()
        there.close()
        pipes.append(here)
    try:
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
            process.join()


def joined(found: list[dict[str, Costs]], name: str) -> dict[str, float]:
    """The slowest worker's seconds, all workers' packets, and one worker's mean of the rest; medians."""
    costs = [each[name] for each in found]

    def of(kind: str, join: Callable[[Any], float]) -> float:
        return statistics.median(join(values) for values in zip(*(getattr(c, kind) for c in costs), strict=True))

    kinds = ("store", "collectives", "payload_bytes", "private_bytes")
    return {"seconds": of("seconds", max), "packets": of("packets", max), **{k: of(k, statistics.mean) for k in kinds}}


def show(workers: int, found: list[tuple[list[int], dict[str, Costs]]], packets: bool) -> dict[str, float]:
    """Print the table of one number of workers, and return its ratios."""
    started, joined_group, ended = (
        statistics.mean(column) / 1e6 for column in zip(*(m for m, _ in found), strict=True)
    )
    print(
        f"\n{workers} workers. Resident MB of a worker: {started:.0f} with torch and laconic imported (shared), ",
        end="",
    )
    print(f"{joined_group:.0f} with the default group and a step, {ended:.0f} at the end")
    print(f"{'ours / peer':<32} {'ms':>15} {'ratio':>6} {'store':>9} {'collectives':>11} {'bytes':>15}", end="")
    print(f" {'packets':>15} {'MB':>11}")
    ratios = {}
    for plan in PLANS:
        for part in PARTS:
            mine, peer = (joined([costs for _, costs in found], f"{plan} {part}{of}") for of in ("", ", peer"))
            ratio = mine["seconds"] / peer["seconds"]
            ratios[f"{workers} workers, {plan}, {part}"] = ratio

            def pair(kind: str, digits: int = 0, scale: float = 1, of: Any = (mine, peer)) -> str:
                return " / ".join(f"{scale * each[kind]:.{digits}f}" for each in of)

            print(f"{plan + ', ' + part:<32} {pair('seconds', 1, 1e3):>15} {ratio:>6.2f} {pair('store'):>9}", end="")
            print(f" {pair('collectives'):>11} {pair('payload_bytes'):>15}", end="")
            print(f" {pair('packets') if packets else '-':>15} {pair('private_bytes', 2, 1e-6):>11}", flush=True)
    return ratios


def own_network() -> bool:
    """Move this process to a network namespace with nothing but loopback; return whether that was possible."""
    if shutil.which("ip") is None or ctypes.CDLL(None).unshare(CLONE_NEWNET):
        return False
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--json", help="write the ratios to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)  # before workers are forked, this process must have no other threads
    packets = own_network()
    print(f"{machine()}, gloo over loopback, {sum(p.numel() for p in Training().model.parameters())} parameters")
    ratios: dict[str, float] = {}
    for workers in options.workers:
        ratios |= show(workers, run(workers), packets)
    write(options.json, ratios)


if __name__ == "__main__":
    main()
