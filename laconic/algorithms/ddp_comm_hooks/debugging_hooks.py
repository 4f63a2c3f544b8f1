"""A hook that does not communicate. The twin of torch's module."""

from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from laconic.comm.queue import resolved

__all__ = ["noop_hook"]


def noop_hook(_: Any, bucket: GradBucket) -> Future[Tensor]:
    """Return each bucket unchanged, without communication.

    Replicas diverge with it. Use it to measure the speed of training without the cost of communication.

    >>> ddp_model.register_comm_hook(None, noop_hook)  # doctest: +SKIP
    """
    return resolved(bucket.buffer())
