"""torch.distributed's collectives as the results of requests.

Means are sums of numbers that were divided before, so that nothing overflows. A `wide` mean leaves equal replicas
bit-equal: a plain sum does that for 2 and 4 workers in fp32 and fp64; otherwise each worker averages one shard
by differences (all_to_all), and the shards are gathered (all_gather): the bytes of a ring all-reduce. A weighted mean
(`Mean(x, shares=...)`) is always computed so.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.exchange import AllToAll, First, Gather, Max, Mean, Request

Group = dist.ProcessGroup

BLOCK = 1 << 17
"""Elements that are averaged at a time."""


def launch(request: Request, group: Group | None) -> Generator[Any, None, Tensor]:
    """Launch the collectives that serve `request`, yield the handle of each, and return the result."""
    workers = 1 if group is None else group.size()
    if workers == 1:
        return request.x[None] if isinstance(request, Gather | AllToAll) else request.x
    if isinstance(request, Gather):
        out = request.x.new_empty((workers, *request.x.shape))
        yield dist.all_gather(list(out.unbind()), request.x.contiguous(), group=group, async_op=True)
        return out
    if isinstance(request, AllToAll):
        return (yield from _all_to_all(request, group))
    if isinstance(request, First):
        sent = request.x.contiguous()
        assert group is not None
        yield dist.broadcast(sent, dist.get_global_rank(group, request.worker), group=group, async_op=True)
        return sent
    if isinstance(request, Max):
        x = request.x.contiguous()
        yield dist.all_reduce(x, dist.ReduceOp.MAX, group=group, async_op=True)
        return x
    if request.shares is not None or (request.wide and not sums_exactly(request.x.dtype, workers)):
        return (yield from _wide_mean(request, workers, group))
    x = request.x.contiguous()
    x.div_(workers)
    yield dist.all_reduce(x, group=group, async_op=True)
    return x


def _all_to_all(request: AllToAll, group: Group | None) -> Generator[Any, None, Tensor]:
    rows, mine = request.rows, request.rows[dist.get_rank(group)]
    received = request.x.new_empty((len(rows) * mine, *request.x.shape[1:]))
    yield dist.all_to_all_single(
        received, request.x.contiguous(), [mine] * len(rows), list(rows), group=group, async_op=True
    )
    return received.view(len(rows), mine, *request.x.shape[1:])


def sums_exactly(dtype: torch.dtype, workers: int) -> bool:
    """Return whether equal values survive a plain sum in any order: for 2 and 4 terms, but not for 3, 5 or more.

    Subnormal numbers, below 1e-38, may lose their last bit.
    """
    return dtype in (torch.float32, torch.float64) and workers in (2, 4)


def _wide_mean(request: Mean, workers: int, group: Group | None) -> Generator[Any, None, Tensor]:
    """Average one shard of `x` on each worker, then gather the shards: one copy of `x` in extra memory."""
    x = request.x
    flat = x.contiguous().view(-1)
    shards = shards_of(flat.numel(), workers)
    share, me = shards[0], dist.get_rank(group)
    buffer = flat.new_empty(workers * share)
    received = buffer[: workers * shards[me]]
    in_bytes = [size * flat.element_size() for size in shards]
    yield dist.all_to_all_single(
        _as_bytes(received), _as_bytes(flat), [in_bytes[me]] * workers, in_bytes, group=group, async_op=True
    )
    rows = received.view(workers, shards[me]).unbind()
    mine = flat.new_empty(share)
    mean_in_blocks(rows, mine, request.shares)
    gathered = list(_as_bytes(buffer).view(workers, -1).unbind())
    yield dist.all_gather(gathered, _as_bytes(mine), group=group, async_op=True)
    return flat.copy_(buffer[: flat.numel()]).view(x.shape)


def shards_of(count: int, workers: int) -> list[int]:
    """Return how many of `count` elements each worker averages: the last shards may be smaller, or empty.

    >>> shards_of(10, workers=4)
    [3, 3, 3, 1]
    """
    share = -(-count // workers)
    return [max(0, min(share, count - worker * share)) for worker in range(workers)]


def mean_in_blocks(rows: Sequence[Tensor], into: Tensor, shares: Sequence[float] | None = None) -> None:
    """Write the mean of flat tensors, in blocks that stay in a core's cache, without large temporaries."""
    count = rows[0].numel()
    for start in range(0, count, BLOCK):
        end = min(start + BLOCK, count)
        blocks = [row[start:end] for row in rows]
        into[start:end] = mean(blocks) if shares is None else weighted_mean(blocks, shares)


def _as_bytes(x: Tensor) -> Tensor:
    """View a flat tensor as bytes: backends do not support all dtypes."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


def mean(rows: Sequence[Tensor]) -> Tensor:
    """Average rows by their differences from the first: where all are equal, the mean is exactly that.

    In fp32 or wider, and without rounding where the sum needs none. Integers are rounded to the nearest.

    >>> mean([torch.tensor([0.1]), torch.tensor([0.1]), torch.tensor([0.1])]) == torch.tensor([0.1])
    tensor([True])
    """
    kind = rows[0].dtype
    if not (kind.is_floating_point or kind.is_complex):
        first, *others = [row.long() for row in rows]
        return first + (torch.stack(others).sub_(first).sum(0).double() / len(rows)).round_().long()
    if kind.itemsize < 4:
        rows = [row.float() for row in rows]
    first, *others = rows
    off = first - others[0]
    for other in others[1:]:
        off += first - other
    result = torch.sub(first, off, alpha=1 / len(rows))  # a difference: a sum would sync -0.0 into 0.0
    if result.device.type == "cpu" and bool(result.sum().isfinite()):
        return result
    # Differences of infinities are NaN, and those of huge numbers may overflow: average these term by term.
    return torch.where(result.isfinite(), result, torch.stack([row / len(rows) for row in rows]).sum(0))


def weighted_mean(rows: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Average rows of floating point by their shares, which are 1 on average.

    Differences from the row of the largest share are averaged. So where all rows are equal, the mean is exactly that,
    also in half precision: a product of each row would be rounded. And a large row of a small share costs no digits.

    >>> mean_of = weighted_mean([torch.tensor([0.1]), torch.tensor([0.1])], [0.7, 1.3])
    >>> mean_of == torch.tensor([0.1]), weighted_mean([torch.tensor([torch.nan]), torch.tensor([3.0])], [0.0, 2.0])
    (tensor([True]), tensor([3.]))
    """
    weighed = [(row if row.itemsize >= 4 else row.float(), s) for row, s in zip(rows, shares, strict=True) if s]
    base, _ = max(weighed, key=lambda each: each[1])
    off = torch.zeros_like(base)
    for row, share in weighed:
        if row is not base:
            off.add_(base - row, alpha=share)
    result = torch.sub(base, off, alpha=1 / len(rows))
    if result.device.type == "cpu" and bool(result.sum().isfinite()):
        return result
    terms = torch.stack([row * (share / len(rows)) for row, share in weighed])
    return torch.where(result.isfinite(), result, terms.sum(0))
