"""Hooks that send every gradient in one all-reduce: as it is, or in half the bits. The twin of torch's module.

They work on CPU over gloo as well as on CUDA.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from laconic.algorithms.ddp_comm_hooks.hooking import average_once
from laconic.codecs import Cast, Exact

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

Hook = Callable[[Any, Any], Future[Tensor]]


def allreduce_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients, as DDP does without a hook.

    >>> ddp_model.register_comm_hook(process_group, allreduce_hook)  # doctest: +SKIP
    """
    return average_once(Exact(), process_group, bucket)


def fp16_compress_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients in float16, divided by the number of workers before they are summed.

    >>> ddp_model.register_comm_hook(process_group, fp16_compress_hook)  # doctest: +SKIP
    """
    return average_once(Cast("fp16"), process_group, bucket)


def bf16_compress_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients in bfloat16.

    >>> ddp_model.register_comm_hook(process_group, bf16_compress_hook)  # doctest: +SKIP
    """
    return average_once(Cast("bf16"), process_group, bucket)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Give a hook its gradients in float16, and DDP the result in the gradients' own dtype.

    >>> ddp_model.register_comm_hook(state, fp16_compress_wrapper(powerSGD_hook))  # doctest: +SKIP
    """

    def fp16_compress_wrapper_hook(hook_state: Any, bucket: GradBucket) -> Future[Tensor]:
        return _in_half(torch.float16, hook, hook_state, bucket)

    return fp16_compress_wrapper_hook


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Give a hook its gradients in bfloat16, and DDP the result in the gradients' own dtype.

    >>> ddp_model.register_comm_hook(state, bf16_compress_wrapper(powerSGD_hook))  # doctest: +SKIP
    """

    def bf16_compress_wrapper_hook(hook_state: Any, bucket: GradBucket) -> Future[Tensor]:
        return _in_half(torch.bfloat16, hook, hook_state, bucket)

    bf16_compress_wrapper_hook.__name__ = "bf16_compress_wrapped"  # see the end of this file
    return bf16_compress_wrapper_hook


def _in_half(dtype: torch.dtype, hook: Hook, hook_state: Any, bucket: GradBucket) -> Future[Tensor]:
    whole: Tensor = bucket.buffer()
    bucket.set_buffer(whole.to(dtype))

    def back(done: Future[Tensor]) -> Tensor:
        value: Tensor = done.value()
        whole.copy_(value)
        bucket.set_buffer(whole)
        return whole

    return hook(hook_state, bucket).then(back)


# DDP refuses these two names where there is no CUDA, though gloo sums bfloat16 as well. It looks at __name__ alone;
# pickle and DDP's logging go by __qualname__, which stays.
bf16_compress_hook.__name__ = "bf16_compress"
