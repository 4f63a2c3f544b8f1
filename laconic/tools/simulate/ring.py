"""What gloo's collectives compute, bit for bit, for workers in one process.

gloo sums an all_reduce in a ring. The tensor is cut into one chunk for each worker. Chunk c starts at worker c-1 and
goes down the ranks, and each worker adds its own part: c-2, c-3, and so on, to worker c, which then has the sum. So the
order of a sum, and with it the last bit, depends on where in the tensor a number is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.comm.collectives import mean_in_blocks, shards_of, sums_exactly
from laconic.exchange import Mean

SEGMENT_BYTES = 1 << 20
"""The largest message of gloo's ring: the bounds of chunks are multiples of messages."""


def gloo_mean(requests: Sequence[Mean]) -> Tensor:
    """Return the mean that `collectives.launch` computes on a gloo group of as many workers."""
    rows = [request.x.contiguous().view(-1) for request in requests]
    workers, like = len(rows), requests[0].x
    if workers == 1:
        return like
    shares = requests[0].shares
    if shares is not None or (requests[0].wide and not sums_exactly(like.dtype, workers)):
        return _sharded_mean(rows, shares).view(like.shape)
    return ring_sum([row.div_(workers) for row in rows]).view(like.shape)


def ring_sum(rows: Sequence[Tensor]) -> Tensor:
    """Sum flat tensors, one of each worker, in the order of gloo's ring.

    >>> ring_sum([torch.tensor([1e8, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([-1e8, 1.0])]).tolist()
    [0.0, 3.0]
    """
    workers, total = len(rows), torch.empty_like(rows[0])
    chunk = _chunk(rows[0].nbytes, rows[0].element_size(), workers)
    for first in range(0, len(total), chunk):
        owner, part = first // chunk, slice(first, first + chunk)
        into = total[part].copy_(rows[owner - 1][part])
        for rank in range(owner - 2, owner - workers - 1, -1):
            into += rows[rank % workers][part]
    return total


def _chunk(size_bytes: int, element_bytes: int, workers: int) -> int:
    """Return the elements of a worker's chunk: at least two messages, as many on each worker."""
    largest = element_bytes * max(1, SEGMENT_BYTES // element_bytes)
    messages = max(-(-size_bytes // largest), 2 * workers)
    each = -(-messages // workers)
    message_bytes = -(-size_bytes // (each * workers))
    return each * -(-message_bytes // element_bytes)


def _sharded_mean(rows: Sequence[Tensor], shares: Sequence[float] | None) -> Tensor:
    result, first = torch.empty_like(rows[0]), 0
    for size in shards_of(len(result), len(rows)):
        part = slice(first, first + size)
        mean_in_blocks([row[part] for row in rows], result[part], shares)
        first += size
    return result
