"""What codecs in few bits cost: on a GPU beside the least that memory allows, on a CPU beside torch's own hooks.

    python benchmarks/codecs.py --device cuda
    python benchmarks/codecs.py --device cpu --models ResNet-50

On a GPU one process runs one worker's part of an exchange between `--workers` workers: the answers of the others are
made once, in the warm-up, and cost nothing afterwards. Gradients are restored before each run, outside the measured
time. `floor` is the time that the copy bandwidth, measured in the same run, allows for the bytes that must be read and
written:

    encode and decode of rows       numbers read and written once, messages written and read once
    with error feedback             gradient and residual read before and after the exchange, and written: 6 passes
    LowRank with error feedback     7 passes, as in powersgd.py
    any exchange                    messages written, received ones read, means written, all means read

On a CPU, DDP with `--workers` gloo workers runs each hook in turn with a no-op hook (powersgd.py). A cost is the time
over the no-op hook, as a ratio to torch's `quantization_pertensor_hook`, which sends 8 bits. All have one bucket: over
gloo torch's hooks hang with several. They also fail there (`IndexError`), because they expect the futures of NCCL,
which this script makes for them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from powersgd import ONE_BUCKET_MB, Runner, clear, copy_bandwidth, device_name, hook, measure, ours
from processes import free_port
from shapes import MODELS
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, quantization_hooks

from laconic import ByShape, ErrorFeedback, LowRank, Plan
from laconic.codecs import Quantized, TopK
from laconic.codecs.quantized import width
from laconic.exchange import AllToAll, Averaged, Decide, Exchange, Gather, Peers, Request, drive

RUNS = 20
Row = dict[str, Any]


class Others:
    """The other workers: they send what this one sends."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.known: list[Tensor] = []

    def serve(self, exchange: Exchange[Averaged]) -> Averaged:
        """Run one exchange to its end."""
        number = 0

        def answer(request: Request | Decide) -> Tensor:
            nonlocal number
            if isinstance(request, Decide):
                return request.ok
            if not isinstance(request, AllToAll | Gather):
                return request.x
            if number == len(self.known):
                mine = request.x[: request.rows[0]] if isinstance(request, AllToAll) else request.x
                self.known.append(torch.stack([mine] * self.workers))
            number += 1
            return self.known[number - 1]

        return drive(exchange, answer)


def seconds(run: Callable[[], Any], before: Callable[[], Any]) -> float:
    """Return the median time of `run` on the device; `before` is not counted."""
    times = []
    for number in range(RUNS + 4):
        before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        if number >= 4:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def message_bytes(codec: Any, numels: list[int]) -> int:
    """Return the bytes of one worker's messages about tensors of these sizes."""
    if isinstance(codec, TopK):
        return (
            sum(-(-n // codec.chunk) for n in numels) * codec.encode(torch.zeros(1, codec.chunk), None, None).shape[1]
        )
    return sum(-(-n // 128) for n in numels) * width(128, codec.bits)


def cuda_rows(shapes: list[tuple[int, ...]], workers: int, bandwidth: float) -> list[Row]:
    """Measure encode and decode of rows, and whole exchanges with error feedback."""
    numels = [torch.Size(shape).numel() for shape in shapes]
    numel = sum(numels)
    found: list[Row] = []

    def add(label: str, spent: float, least_bytes: float) -> None:
        floor = least_bytes / bandwidth
        found.append({"codec": label, "ms": 1e3 * spent, "floor_ms": 1e3 * floor, "floors": spent / floor})
        print(f"{label:<58} {1e3 * spent:>8.3f} {1e3 * floor:>9.3f} {spent / floor:>8.2f}", flush=True)

    for codec in (Quantized(8), Quantized(4), Quantized(2), TopK(0.03), TopK(0.03, bits=2)):
        rows = torch.randn(numel // codec.row, codec.row, device="cuda")
        sent = message_bytes(codec, [rows.numel()])
        spent = seconds(lambda c=codec, x=rows: c.decode(c.encode(x, None, None), torch.float32), lambda: None)
        add(f"{codec}: encode and decode", spent, 8 * rows.numel() + 2 * sent)
        del rows
    exchanged = 3 + 1 / workers
    for codec in (Quantized(4), TopK(0.03)):
        wrapped = ErrorFeedback(codec) if isinstance(codec, Quantized) else ByShape(ErrorFeedback(codec))
        add(
            str(wrapped),
            exchange_seconds(wrapped, shapes, workers),
            24 * numel + exchanged * message_bytes(codec, numels),
        )
    low = LowRank(32, bits=4)
    matrices = [shape for shape in shapes if low.accepts(torch.Size(shape))]
    thin = [32 * side for m, *n in matrices for side in (m, torch.Size(n).numel())]
    rest = [n for n, shape in zip(numels, shapes, strict=True) if not low.accepts(torch.Size(shape))]
    for factors in (LowRank(32), low):
        quantized = ErrorFeedback(Quantized(4))
        wrapped = ByShape(ErrorFeedback(factors), rest=quantized) if factors.bits else ByShape(ErrorFeedback(factors))
        messages = exchanged * message_bytes(Quantized(4), thin + rest) if factors.bits else 8 * sum(thin)
        add(str(wrapped), exchange_seconds(wrapped, shapes, workers), 28 * numel + messages)
    return found


def exchange_seconds(codec: Any, shapes: list[tuple[int, ...]], workers: int) -> float:
    """Return the time of one worker's part of an exchange of gradients of these shapes, all in one bucket."""
    given = [torch.randn(shape, device="cuda") for shape in shapes]
    tensors = {f"p{i}": t.clone() for i, t in enumerate(given)}
    others, state = Others(workers), {}
    spent = seconds(
        lambda: others.serve(codec.average(tensors, state, Peers(0, workers), reuse=True)),
        lambda: torch._foreach_copy_(list(tensors.values()), given),
    )
    state.clear()
    clear(torch.device("cuda"))
    return spent


def on_cuda(options: argparse.Namespace) -> list[Row]:
    device = torch.device("cuda")
    bandwidth = copy_bandwidth(device)
    print(f"torch {torch.__version__}, {device_name(device)}, copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    rows = []
    for name in options.models:
        shapes = MODELS[name]()
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        print(f"\n{name}: {numel / 1e6:.1f} M numbers\n{'':<58} {'ms':>8} {'floor ms':>9} {'x floor':>8}")
        rows += [{"model": name, **row} for row in cuda_rows(shapes, options.workers, bandwidth)]
    return rows


class FuturesOfNccl:
    """`torch.distributed` as torch's quantisation hooks expect it: the future of all_gather holds the list of lists."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather(self, into: list[Tensor], x: Tensor, group: Any = None, async_op: bool = True) -> Any:
        future = dist.all_gather(into, x, group=group, async_op=True).get_future().then(lambda _: [into])
        return SimpleNamespace(get_future=lambda: future)


def on_cpu(worker: int, options: argparse.Namespace, port: int) -> None:
    """Measure hooks of DDP; the first of them is the base of the ratios."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.workers))
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, datetime.timedelta(seconds=300), world_size=options.workers, rank=worker)
    device, rows = torch.device("cpu"), []
    quantization_hooks.dist = FuturesOfNccl()
    hooks = [
        ("torch quantization_pertensor_hook", hook(quantization_hooks.quantization_pertensor_hook, 1)),
        ("torch quantization_perchannel_hook", hook(quantization_hooks.quantization_perchannel_hook, 1)),
        *(
            (str(codec), ours(Plan(codec=codec)))
            for codec in (Quantized(8), Quantized(4), ErrorFeedback(Quantized(8)), ErrorFeedback(Quantized(4)))
        ),
    ]
    for name in options.models:
        shapes, first = MODELS[name](), 0.0
        base = Runner(shapes, ONE_BUCKET_MB, hook(debugging_hooks.noop_hook, 0), device, torch.float32)
        for label, register in hooks:
            try:
                measured = Runner(shapes, ONE_BUCKET_MB, register, device, torch.float32)
                over, spread, steps = measure(measured, base, device, options.seconds)
            except RuntimeError as error:  # a failure of a peer is a result, the same on all workers
                if worker == 0:
                    print(f"{name:<10} {label:<44} failed: {str(error).strip().splitlines()[0][-100:]}", flush=True)
                continue
            first = first or over
            rows.append(
                {"model": name, "codec": label, "ms": 1e3 * over, "spread_ms": 1e3 * spread, "ratio": over / first}
            )
            if worker == 0:
                costs = f"{1e3 * over:>9.1f} ms ± {1e3 * spread:>5.1f} ({steps} steps)"
                print(f"{name:<10} {label:<44} {costs}, {over / first:>5.2f} of the first", flush=True)
    if worker == 0 and options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="GPT-2 medium on a GPU, ResNet-50 on a CPU")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds to measure each hook on the CPU")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    options.models = options.models or (["GPT-2 medium"] if options.device == "cuda" else ["ResNet-50"])
    if options.device == "cuda":
        rows = on_cuda(options)
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1))
        return
    port = free_port()
    mp.spawn(on_cpu, (options, port), nprocs=options.workers)


if __name__ == "__main__":
    main()
