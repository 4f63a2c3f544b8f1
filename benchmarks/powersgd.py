"""PowerSGD side by side: torch's hook, the authors' package, plain all-reduce and laconic, on real models' shapes.

    python benchmarks/powersgd.py --device cuda
    python benchmarks/powersgd.py --device cpu --workers 2 --models ResNet-50

A model of nothing but parameters, wrapped in DDP, whose backward hands out ready gradients: what a hook costs is the
time of that backward over the same with a hook that does nothing. `floor` is 7 passes over fp32 gradients at the copy
bandwidth measured in the same run. Needs torch and laconic's core on the path, nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import logging
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from shapes import MODELS
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic

ONE_BUCKET_MB = 1 << 16


class HandsOut(torch.autograd.Function):
    """A loss whose backward hands out ready gradients."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, out: Tensor) -> Any:
        return (None, *ctx.grads)


class Parameters(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.zeros(s, device=device, dtype=dtype)) for s in shapes])
        self.grads = [torch.randn(s, device=device).to(dtype) for s in shapes]

    def forward(self) -> Tensor:
        return HandsOut.apply(self.grads, *self.all)


def torch_power_sgd(rank: int, batch: bool) -> Callable[[DDP], Callable[[], float]]:
    def put(ddp: DDP) -> Callable[[], float]:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=2, batch_tensors_with_same_shape=batch
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return lambda: 4.0 * state.total_numel_after_compression / max(1, state.iter - 2)

    return put


def hook(function: Any, bytes_each: float) -> Callable[[DDP], Callable[[], float]]:
    def put(ddp: DDP) -> Callable[[], float]:
        ddp.register_comm_hook(None, function)
        numel = sum(p.numel() for p in ddp.parameters())
        return lambda: bytes_each * numel

    return put


def ours(plan: laconic.Plan) -> Callable[[DDP], Callable[[], float]]:
    def put(ddp: DDP) -> Callable[[], float]:
        talk = laconic.attach(plan, ddp, torch.optim.SGD(ddp.parameters(), lr=0.0))
        talk._replica.solo_exact = False  # the codec itself is what is measured
        return lambda: laconic.sent_bytes(plan, list(talk._replica.params.items()))

    return put


def contestants(ranks: list[int], device: str) -> list[tuple[str, float, Any]]:
    """Name, bucket size and what registers the hook."""
    rows: list[tuple[str, float, Any]] = [
        ("plain all-reduce", 25, hook(default_hooks.allreduce_hook, 4)),
    ]
    if device == "cuda":
        rows.append(("torch bf16 hook", 25, hook(default_hooks.bf16_compress_hook, 2)))
    for rank in ranks:
        if device == "cuda":  # on gloo with several buckets torch's hook hangs or crashes
            rows += [(f"torch r={rank}", 25, torch_power_sgd(rank, False))]
            rows += [(f"torch r={rank} batching", 25, torch_power_sgd(rank, True))]
        rows += [(f"torch r={rank} one bucket", ONE_BUCKET_MB, torch_power_sgd(rank, False))]
        rows += [(f"torch r={rank} one bucket, batching", ONE_BUCKET_MB, torch_power_sgd(rank, True))]
        for rounds in ("two", "alternating"):
            plan = laconic.power_sgd(rank=rank, rounds=rounds)
            rows += [(f"laconic r={rank} {rounds}", 25, ours(plan))]
            rows += [(f"laconic r={rank} {rounds}, one bucket", ONE_BUCKET_MB, ours(plan))]
    return rows


def measure(shapes: Any, bucket_mb: float, put: Any, device: torch.device, dtype: torch.dtype, seconds: float) -> Any:
    """Median seconds of a backward, peak bytes of memory and bytes sent; nothing of it stays in memory."""
    try:
        return timed(shapes, bucket_mb, put, device, dtype, seconds)
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def timed(shapes: Any, bucket_mb: float, put: Any, device: torch.device, dtype: torch.dtype, seconds: float) -> Any:
    model = Parameters(shapes, device, dtype)
    ddp = DDP(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    sent = put(ddp)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    times: list[float] = []

    def step() -> None:
        start = time.perf_counter()
        ddp().backward()
        synchronize()
        times.append(time.perf_counter() - start)

    for _ in range(6):
        step()
    times.clear()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    end = time.monotonic() + seconds
    for _ in range(200):
        step()
        go_on = torch.tensor([float(time.monotonic() < end)], device=device)
        dist.all_reduce(go_on, op=dist.ReduceOp.MIN)
        if len(times) >= 5 and not float(go_on):
            break
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return statistics.median(times), peak, sent()


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second by a copy."""
    size = 1 << 30 if device.type == "cuda" else 1 << 28
    a, b = torch.ones(size // 4, device=device), torch.empty(size // 4, device=device)
    best = 1e9
    for _ in range(8):
        start = time.perf_counter()
        b.copy_(a)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size / best


def run(worker: int, options: argparse.Namespace, port: int) -> None:
    logging.disable(logging.WARNING)
    device = torch.device(options.device, worker if options.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.workers))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=worker,
        world_size=options.workers,
        timeout=datetime.timedelta(seconds=300),
    )
    dtype = getattr(torch, options.dtype)
    bandwidth = copy_bandwidth(device)
    results = []
    if worker == 0:
        print(
            f"torch {torch.__version__}, {options.workers} worker(s), {options.dtype} gradients, {device_name(device)}"
        )
        print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    for name in options.models:
        shapes = MODELS[name]()
        numel = sum(torch.Size(s).numel() for s in shapes)
        floor = 7 * 4 * numel / bandwidth
        bases = {}
        for bucket_mb in (25, ONE_BUCKET_MB):
            bases[bucket_mb] = measure(
                shapes, bucket_mb, hook(debugging_hooks.noop_hook, 0), device, dtype, options.seconds
            )
        if worker == 0:
            print(f"\n{name}: {numel / 1e6:.1f} M, floor {1e3 * floor:.2f} ms, no-op {1e3 * bases[25][0]:.2f} ms")
            print(f"{'hook':<36} {'ms over no-op':>14} {'x floor':>8} {'GiB over no-op':>15} {'MB sent':>9}")
        for label, bucket_mb, put in contestants(options.ranks, options.device):
            if options.only and not any(word in label for word in options.only):
                continue
            try:
                seconds, peak, sent = measure(shapes, bucket_mb, put, device, dtype, options.seconds)
            except Exception as error:  # a peer that fails is a result
                if worker == 0:
                    print(f"{label:<36} failed: {type(error).__name__}: {str(error)[:80]}")
                continue
            over = seconds - bases[bucket_mb][0]
            extra = (peak - bases[bucket_mb][1]) / 2**30
            row = {"model": name, "hook": label, "ms": 1e3 * over, "floors": over / floor, "gib": extra, "sent": sent}
            results.append(row)
            if worker == 0:
                print(
                    f"{label:<36} {1e3 * over:>14.2f} {over / floor:>8.2f} {extra:>15.2f} {sent / 1e6:>9.2f}",
                    flush=True,
                )
    if worker == 0 and options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long to measure each hook")
    parser.add_argument("--only", nargs="+", help="only hooks with one of these words in their name")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run, (options, port), nprocs=options.workers)


if __name__ == "__main__":
    main()
