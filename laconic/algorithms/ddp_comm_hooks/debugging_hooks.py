"""The hook that does nothing. The twin of torch's module."""

from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

__all__ = ["noop_hook"]


def noop_hook(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return each bucket as it is, without a word to anyone.

    Replicas drift apart under it. It tells how fast training would be if talking cost nothing.

    >>> ddp_model.register_comm_hook(None, noop_hook)  # doctest: +SKIP
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
