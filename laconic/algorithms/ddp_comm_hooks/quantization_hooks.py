"""Hooks that send 8 bits per element, in one collective for each bucket. The twin of torch's module."""

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from laconic.algorithms.ddp_comm_hooks.eight_bits import EightBits
from laconic.algorithms.ddp_comm_hooks.engine import average_once

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]


def quantization_pertensor_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average each bucket in 8 bits per element, with one scale for the bucket."""
    return average_once(EightBits(block=None), process_group, bucket)


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> Future[Tensor]:
    """Average each bucket in 8 bits per element, with one scale for every `bucket_size` elements."""
    return average_once(EightBits(block=bucket_size), process_group, bucket)
