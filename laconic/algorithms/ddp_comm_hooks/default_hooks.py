"""Hooks that average a bucket in one all-reduce, uncompressed or in half precision. The twin of torch's module.

>>> ddp_model.register_comm_hook(process_group, fp16_compress_hook)  # doctest: +SKIP
>>> ddp_model.register_comm_hook(state, fp16_compress_wrapper(powerSGD_hook))  # doctest: +SKIP
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from laconic.algorithms.ddp_comm_hooks.engine import average_once
from laconic.codecs import Cast, Exact
from laconic.torch_private.distributed import GradBucket

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

Hook = Callable[[Any, Any], Future[Tensor]]


def allreduce_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients, as DDP does without a hook."""
    return average_once(Exact(), process_group, bucket)


def fp16_compress_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients in float16. They are divided by the number of workers before the sum."""
    return average_once(Cast("fp16"), process_group, bucket)


def bf16_compress_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients in bfloat16."""
    return average_once(Cast("bf16"), process_group, bucket)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Run a hook on the gradients in float16, and return the result to DDP in their own dtype."""
    return _in_half(torch.float16, hook, "fp16")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Run a hook on the gradients in bfloat16, and return the result to DDP in their own dtype."""
    return _in_half(torch.bfloat16, hook, "bf16")


def _in_half(dtype: torch.dtype, hook: Hook, kind: str) -> Hook:
    def wrapped(hook_state: Any, bucket: GradBucket) -> Future[Tensor]:
        flat: Tensor = bucket.buffer()
        bucket.set_buffer(flat.to(dtype))

        def restore(done: Future[Tensor]) -> Tensor:
            flat.copy_(done.value())
            bucket.set_buffer(flat)
            return flat

        return hook(hook_state, bucket).then(restore)

    wrapped.__qualname__ = f"{kind}_compress_wrapper.<locals>.{kind}_compress_wrapper_hook"
    wrapped.__name__ = f"{kind}_compress_wrapped"
    return wrapped


# Without CUDA, DDP rejects hooks whose __name__ is that of torch's two bf16 hooks, although gloo can sum bfloat16.
# pickle and DDP's logging use __qualname__, which is unchanged.
bf16_compress_hook.__name__ = "bf16_compress"
