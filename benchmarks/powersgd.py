"""Compare PowerSGD's cost on the shapes of real models: torch's hook, the authors' package, all_reduce and laconic.

    python benchmarks/powersgd.py --device cuda
    python benchmarks/powersgd.py --device cpu --workers 2 --models ResNet-50

The model has only parameters and is wrapped in DDP; its backward returns precomputed gradients. The cost of a hook is
the time of that backward minus the time with a no-op hook. Both alternate, so that other load on the machine affects
both. A cost is the difference of the medians, and the spread is half the interquartile range of the hook's times.
`floor` is 7 passes over fp32 gradients at the copy bandwidth measured in the same run. On a CPU each hook has processes
of its own: torch's computes in threads of gloo, whose OpenMP threads stay and slow down all that is measured after it.
With --times each hook is measured in so many of them, and the fastest counts: some are slow from start to end.

Needs torch and laconic. The authors' package is measured if it is installed from its repository
(https://github.com/epfml/powersgd); the one on PyPI is empty.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import logging
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from processes import free_port
from shapes import MODELS
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.algorithms.ddp_comm_hooks import powerSGD_hook as twin
from laconic.codecs.routing import routed

ONE_BUCKET_MB = 1 << 16
WARM_UP = 6
MAX_STEPS = 400

Hook = tuple[Callable[[], float], Callable[[], None]]
"""A function that returns the bytes sent in a step, and one to call after backward."""
Register = Callable[[DDP], Hook]


class PrecomputedGradients(torch.autograd.Function):
    """A loss whose backward returns precomputed gradients."""

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
        return PrecomputedGradients.apply(self.grads, *self.all)


def do_nothing() -> None:
    """Do nothing after backward, as for most hooks."""


def power_sgd_hook(rank: int, batch: bool, hooks: ModuleType = powerSGD_hook) -> Register:
    """The hook of torch, or of its twin."""

    def register(ddp: DDP) -> Hook:
        state = hooks.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=2, batch_tensors_with_same_shape=batch
        )
        ddp.register_comm_hook(state, hooks.powerSGD_hook)
        return (lambda: 4.0 * state.total_numel_after_compression / max(1, state.iter - 2)), do_nothing

    return register


def authors_power_sgd(rank: int) -> Register:
    """Their package takes gradients after backward; it does not report the bytes that it sends."""

    def register(ddp: DDP) -> Hook:
        from powersgd import Config, PowerSGD

        params = list(ddp.parameters())
        config = Config(rank=rank, min_compression_rate=2, num_iters_per_step=1, start_compressing_after_num_steps=0)
        aggregator = PowerSGD(params, config=config)
        ddp.register_comm_hook(None, debugging_hooks.noop_hook)

        def after() -> None:
            with torch.no_grad():
                means = aggregator.aggregate([p.grad for p in params])
                torch._foreach_copy_([p.grad for p in params], means)

        return (lambda: math.nan), after

    return register


def hook(function: Any, bytes_each: float) -> Register:
    def register(ddp: DDP) -> Hook:
        ddp.register_comm_hook(None, function)
        numel = sum(p.numel() for p in ddp.parameters())
        return (lambda: bytes_each * numel), do_nothing

    return register


def ours(plan: laconic.Plan) -> Register:
    def register(ddp: DDP) -> Hook:
        # No optimizer steps here, so nothing would read what the check for NaN notes: gpt_step.py measures that check.
        unused = torch.optim.SGD(ddp.parameters(), lr=0.0)
        session = laconic.attach(plan, ddp, unused, nonfinite="ignore")
        session.wrap_codec(lambda _: routed(plan.codec))  # in a world of one, where nothing would be encoded
        return (lambda: laconic.sent_bytes(plan, session.parameters)), do_nothing

    return register


def hooks(ranks: list[int], device: str) -> list[tuple[str, float, Any]]:
    """Return the name, the bucket size and the function that registers each hook."""
    rows: list[tuple[str, float, Any]] = [("plain all-reduce", 25, hook(default_hooks.allreduce_hook, 4))]
    if device == "cuda":
        rows.append(("torch bf16 hook", 25, hook(default_hooks.bf16_compress_hook, 2)))
    for rank in ranks:
        if device == "cuda":  # on gloo with several buckets torch's hook hangs or crashes
            rows += [(f"torch r={rank}", 25, power_sgd_hook(rank, False))]
            rows += [(f"torch r={rank} batching", 25, power_sgd_hook(rank, True))]
        rows += [(f"torch r={rank} one bucket", ONE_BUCKET_MB, power_sgd_hook(rank, False))]
        rows += [(f"torch r={rank} one bucket, batching", ONE_BUCKET_MB, power_sgd_hook(rank, True))]
        rows += [(f"authors r={rank}", ONE_BUCKET_MB, authors_power_sgd(rank))]
        rows += [(f"twin r={rank}", 25, power_sgd_hook(rank, False, twin))]
        rows += [(f"twin r={rank} one bucket", ONE_BUCKET_MB, power_sgd_hook(rank, False, twin))]
        for rounds in ("two", "alternating"):
            plan = laconic.power_sgd(rank=rank, bits=None, rounds=rounds)
            rows += [(f"laconic r={rank} {rounds}", 25, ours(plan))]
            rows += [(f"laconic r={rank} {rounds}, one bucket", ONE_BUCKET_MB, ours(plan))]
    return rows


def chosen(options: argparse.Namespace) -> list[tuple[str, float, Any]]:
    """Return the hooks with one of the words of --only in their names."""
    words = options.only or [""]
    return [row for row in hooks(options.ranks, options.device) if any(word in row[0] for word in words)]


class Runner:
    """One model with one hook: its steps, their times, and its memory."""

    def __init__(self, shapes: Any, mb: float, register: Register, device: torch.device, dtype: torch.dtype) -> None:
        self.cuda = device.type == "cuda"
        self.before = torch.cuda.memory_allocated() if self.cuda else 0
        self.ddp = DDP(Parameters(shapes, device, dtype), bucket_cap_mb=mb, gradient_as_bucket_view=True)
        self.sent, self.after = register(self.ddp)
        self.times: list[float] = []
        for step in range(WARM_UP):
            if step == WARM_UP - 2 and self.cuda:  # buckets are built, kernels compiled
                torch.cuda.reset_peak_memory_stats()
            self.step()
        self.peak = torch.cuda.max_memory_allocated() if self.cuda else 0
        self.times.clear()

    def step(self) -> None:
        start = time.perf_counter()
        self.ddp().backward()
        self.after()
        if self.cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter() - start)


def measure(measured: Runner, base: Runner, device: torch.device, seconds: float) -> tuple[float, float, int]:
    """Return the seconds over the base, half the interquartile range, and the number of steps."""
    base.times.clear()
    end = time.monotonic() + seconds
    gc.collect()
    gc.disable()  # a collection during a step is not part of the cost
    for step in range(MAX_STEPS):
        for runner in (base, measured) if step % 2 else (measured, base):
            runner.step()
        if step >= 4 and step % 4 == 0:
            go_on = torch.tensor([float(time.monotonic() < end)], device=device)
            dist.all_reduce(go_on, op=dist.ReduceOp.MIN)
            if not float(go_on):
                break
    gc.enable()
    low, _, high = statistics.quantiles(measured.times, n=4)
    over = statistics.median(measured.times) - statistics.median(base.times)
    return over, (high - low) / 2, len(measured.times)


def clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes that a copy reads and writes in one second."""
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


def run(worker: int, options: argparse.Namespace, port: int, label: str | None, file: str, title: bool) -> None:
    """Measure one hook, or all of them, as one worker. Worker 0 writes the rows to the file."""
    logging.disable(logging.WARNING)
    device = torch.device(options.device, worker if options.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.workers))
    backend, address = "nccl" if device.type == "cuda" else "gloo", f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, address, datetime.timedelta(seconds=300), world_size=options.workers, rank=worker)
    log = print if worker == 0 else lambda *_, **__: None
    bandwidth = copy_bandwidth(device)
    if title:
        log(f"torch {torch.__version__}, {options.workers} worker(s), {options.dtype} gradients, {device_name(device)}")
        log(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    rows = [
        row for name in options.models for row in measure_model(name, options, device, bandwidth, log, label, title)
    ]
    if worker == 0:
        Path(file).write_text(json.dumps(rows))
    dist.destroy_process_group()


def measure_model(
    name: str,
    options: argparse.Namespace,
    device: torch.device,
    bandwidth: float,
    log: Callable[..., None],
    only: str | None,
    title: bool,
) -> list[dict[str, Any]]:
    """Measure one hook, or all of them, on one model, print a line for each, and return the rows."""
    shapes, dtype = MODELS[name](), getattr(torch, options.dtype)
    numel = sum(torch.Size(s).numel() for s in shapes)
    floor = 7 * 4 * numel / bandwidth
    noop = hook(debugging_hooks.noop_hook, 0)
    bases = {mb: Runner(shapes, mb, noop, device, dtype) for mb in (25, ONE_BUCKET_MB)}
    for _ in range(9):
        bases[25].step()
    no_op_s = statistics.median(bases[25].times)
    if title:
        log(f"\n{name}: {numel / 1e6:.1f} M, floor {1e3 * floor:.2f} ms, no-op {1e3 * no_op_s:.2f} ms")
        log(f"{'hook':<36} {'ms over no-op':>14} {'+-':>6} {'x floor':>8} {'GiB over':>9} {'MB sent':>9}")
    rows = []
    for label, bucket_mb, register in chosen(options):
        if only not in (None, label):
            continue
        base = bases[bucket_mb]
        try:
            measured = Runner(shapes, bucket_mb, register, device, dtype)
            over, spread, steps = measure(measured, base, device, options.seconds)
        except Exception as error:  # a failure of a peer is a result
            what = "not installed" if isinstance(error, ImportError) else f"failed: {type(error).__name__}: {error}"
            log(f"{label:<36} {what[:100]}", flush=True)
            clear(device)
            continue
        peak, before, sent = measured.peak, measured.before, measured.sent()
        del measured
        clear(device)
        if device.type == "cuda":  # memory of an earlier hook may be freed by now
            before = min(before, torch.cuda.memory_allocated())
        extra = (peak - before - base.peak + base.before) / 2**30
        rows.append({
            "model": name, "hook": label, "ms": 1e3 * over, "spread_ms": 1e3 * spread, "steps": steps,
            "floors": over / floor, "gib": extra, "sent": sent,
        })  # fmt: skip
        costs = f"{1e3 * over:>14.2f} {1e3 * spread:>6.2f} {over / floor:>8.2f}"
        log(f"{label:<36} {costs} {extra:>9.2f} {sent / 1e6:>9.2f}", flush=True)
    bases.clear()
    clear(device)
    return rows


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds to measure each hook")
    parser.add_argument("--times", type=int, default=1, help="on a CPU: processes for each hook; the fastest counts")
    parser.add_argument("--only", nargs="+", help="only hooks with one of these words in their name")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    models: list[list[str]] = [options.models]
    labels: list[str | None] = [None]
    if options.device == "cuda":
        options.times = 1
    else:
        models, labels = [[name] for name in options.models], [label for label, _, _ in chosen(options)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        for options.models in models:
            for label in labels:
                found = []
                for time_ in range(options.times):
                    title = label == labels[0] and time_ == 0
                    mp.spawn(run, (options, free_port(), label, str(file), title), nprocs=options.workers)
                    found.append(json.loads(file.read_text()))
                rows += min(found, key=lambda each: (not each, sum(row["ms"] for row in each)))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
