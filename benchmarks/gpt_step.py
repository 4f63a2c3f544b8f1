"""Measure what `power_sgd(rank=4, bits=None)` adds to a training step: a GPT of 355 M parameters on one GPU.

    python benchmarks/gpt_step.py
    python benchmarks/gpt_step.py --checks    # instead, what the check for NaN and Inf costs

bf16 autocast, AdamW, one worker over NCCL; beside it DDP with a hook that does nothing, before and after. The checks
are switched on and off in one training, by stretches of 8 steps in random order.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.codecs.routing import routed

VOCABULARY, WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 50257, 1024, 24, 16, 1024, 32

SIZES = [(24, 1024, 1024, 32), (24, 1024, 1024, 4), (12, 768, 1024, 8), (6, 256, 256, 4)]
"""Layers, width, context and batch for the checks: from GPU-bound to host-bound."""

OURS = "power_sgd(rank=4, bits=None)"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = self.qkv(self.before(x)).view(shape).permute(2, 0, 3, 1, 4)  # [batch, heads, context, width]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.last(self.blocks(h)) @ self.tokens.weight.T


def step(ddp: DDP, optimizer: torch.optim.Optimizer, text: Tensor) -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(ddp(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def step_seconds(register: Callable[[DDP, torch.optim.Optimizer], object]) -> tuple[float, float]:
    """Return the median seconds of a step and the peak GiB."""
    torch.manual_seed(0)
    ddp = DDP(GPT().cuda(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=True)
    session = register(ddp, optimizer)
    text = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), device="cuda")
    times = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(ddp, optimizer, text)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    del session
    return statistics.median(times[4:]), torch.cuda.max_memory_allocated() / 2**30


def no_op(ddp: DDP, optimizer: torch.optim.Optimizer) -> None:
    ddp.register_comm_hook(None, noop_hook)


def ours(ddp: DDP, optimizer: torch.optim.Optimizer) -> laconic.Session:
    session = laconic.attach(OURS, ddp, optimizer)
    session.wrap_codec(lambda _: routed(session.plan.codec))  # in a world of one, where nothing would be encoded
    return session


def checks(plan: str, sizes: tuple[int, int, int, int]) -> str:
    """What the check for NaN and Inf adds to a step."""
    global LAYERS, WIDTH, HEADS, CONTEXT
    LAYERS, WIDTH, CONTEXT, batch = sizes
    HEADS = WIDTH // 64
    ddp = DDP(GPT().cuda(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-5, fused=True)
    session = laconic.attach(plan, ddp, optimizer)
    session.wrap_codec(lambda _: routed(session.plan.codec))
    text = torch.randint(0, VOCABULARY, (batch, CONTEXT + 1), device="cuda")

    def stretch(mode: str) -> float:
        session.nonfinite = "ignore" if mode == "off" else "skip"
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(8):
            step(ddp, optimizer, text)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / 8

    times: dict[str, list[float]] = {"off": [], "on": []}
    for turn in range(16):
        for mode in random.sample(list(times), 2):
            seconds = stretch(mode)
            if turn >= 2:  # warm by then
                times[mode].append(seconds)
    session.detach()
    off, on = (statistics.median(each) for each in times.values())
    millions = sum(p.numel() for p in ddp.parameters()) / 1e6
    return (
        f"{plan:<18} {millions:4.0f} M, batch {batch:2}, context {CONTEXT:4}: {1e3 * off:6.1f} ms a step, "
        f"{100 * (on / off - 1):+.1f}% with the check"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29533", rank=0, world_size=1)
    if options.checks:
        for plan in ("ddp()", OURS):
            for sizes in SIZES:
                print(checks(plan, sizes), flush=True)
                gc.collect()
                torch.cuda.empty_cache()
    else:
        whole_steps()
    dist.destroy_process_group()


def whole_steps() -> None:
    results = {}
    for name, register in (("no-op", no_op), (OURS, ours), ("no-op again", no_op)):
        results[name] = step_seconds(register)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{name:<20} {1e3 * results[name][0]:8.1f} ms   peak {results[name][1]:6.1f} GiB", flush=True)
    base = min(results["no-op"][0], results["no-op again"][0])
    print(f"PowerSGD adds {100 * (results[OURS][0] / base - 1):.2f}% to a step")


if __name__ == "__main__":
    main()
