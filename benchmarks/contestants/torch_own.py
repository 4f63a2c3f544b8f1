"""What torch itself has: DDP and its communication hooks, and post-local SGD."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from contestants.contract import Host, Training


def alone(host: Host) -> Training:
    """No communication at all: each worker trains by itself."""
    return replace(host.bare(), alone=True)


def ddp(host: Host) -> Training:
    """DistributedDataParallel as it is."""
    return host.ddp()[1]


def bf16(host: Host) -> Training:
    """DDP with gradients in bf16."""
    model, training = host.ddp()
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return training


def fp16(host: Host) -> Training:
    """DDP with gradients in fp16."""
    model, training = host.ddp()
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return training


def power_sgd(host: Host, rank: int, start: int, fp16: bool) -> Training:
    """DDP with torch's PowerSGD hook."""
    model, training = host.ddp()
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
    model.register_comm_hook(state, default_hooks.fp16_compress_wrapper(powerSGD_hook) if fp16 else powerSGD_hook)
    return training


def post_local_sgd(host: Host, period: int, start: int) -> Training:
    """DDP for `start` steps, then averages of the weights alone: each machine has one worker."""
    from torch.distributed.optim import PostLocalSGDOptimizer  # a module that warns of itself

    model, training = host.ddp()
    state = PostLocalSGDState(dist.group.WORLD, None, start, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=period, warmup_steps=start)
    return replace(training, optimizer=PostLocalSGDOptimizer(training.inner, averager))
