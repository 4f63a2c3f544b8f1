"""DDP communication hooks by name. The twin of torch's package."""

from enum import Enum, member
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from laconic.algorithms.ddp_comm_hooks import debugging_hooks as debugging
from laconic.algorithms.ddp_comm_hooks import default_hooks as default
from laconic.algorithms.ddp_comm_hooks import powerSGD_hook as powerSGD
from laconic.algorithms.ddp_comm_hooks import quantization_hooks as quantization

__all__ = ["DDPCommHookType", "register_ddp_comm_hook"]


def _register(hook: Any, model: DistributedDataParallel, state: Any) -> None:
    model.register_comm_hook(state, hook)


def _register_power_sgd(hook: Any, rank: int, model: DistributedDataParallel, state: dist.ProcessGroup | None) -> None:
    model.register_comm_hook(powerSGD.PowerSGDState(process_group=state, matrix_approximation_rank=rank), hook)


class DDPCommHookType(Enum):
    """Hooks by name. Each value registers its hook: `DDPCommHookType.ALLREDUCE.value(model=model, state=group)`."""

    ALLREDUCE = member(partial(_register, default.allreduce_hook))
    FP16_COMPRESS = member(partial(_register, default.fp16_compress_hook))
    BF16_COMPRESS = member(partial(_register, default.bf16_compress_hook))
    QUANTIZE_PER_TENSOR = member(partial(_register, quantization.quantization_pertensor_hook))
    QUANTIZE_PER_CHANNEL = member(partial(_register, quantization.quantization_perchannel_hook))
    POWER_SGD = member(partial(_register_power_sgd, powerSGD.powerSGD_hook, 1))
    POWER_SGD_RANK2 = member(partial(_register_power_sgd, powerSGD.powerSGD_hook, 2))
    BATCHED_POWER_SGD = member(partial(_register_power_sgd, powerSGD.batched_powerSGD_hook, 1))
    BATCHED_POWER_SGD_RANK2 = member(partial(_register_power_sgd, powerSGD.batched_powerSGD_hook, 2))
    NOOP = member(partial(_register, debugging.noop_hook))


def register_ddp_comm_hook(comm_hook_type: DDPCommHookType, model: DistributedDataParallel, state: Any = None) -> None:
    """Register a hook by its name. `state` is the state of the hook; for PowerSGD it is a process group."""
    comm_hook_type.value(model=model, state=state)
