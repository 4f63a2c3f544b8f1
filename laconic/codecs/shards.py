"""The mean of tensors that travel in few bits: every worker averages one shard of each tensor.

A tensor is cut into rows, and each worker owns some of the rows. All workers encode all rows and send them to their
owners (all_to_all). An owner adds the others' rows to its own, which it has exactly, encodes the means, and sends
them to all (all_gather). So a worker sends 2(p−1)/p encoded copies for any number of workers p, as a ring all_reduce.

What the second encoding loses, only the owner knows: it counts as lost by its own message, so error feedback keeps it.
Who owns what depends on names and shapes alone, never on the bucket: a resumed run repeats the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from laconic.exchange import AllToAll, Averaged, Exchange, Gather, Peers, State, Tensors, all_finite
from laconic.packing import Shards, known_shards


class Rows(Protocol):
    """How rows of numbers become messages of equal length, and back."""

    @property
    def row(self) -> int:
        """The numbers in a row."""
        ...

    def encode(self, rows: Tensor, counts: Tensor | None, keys: Tensor | None) -> Tensor:
        """Encode rows [n, row] as messages [n, bytes]; `counts` of the numbers in each row are not padding."""
        ...

    def decode(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode messages [..., bytes] into rows [..., row]."""
        ...


def reduce_in_shards(
    tensors: Tensors, codec: Rows, state: State, peers: Peers, turn: int | None = None, of_means: Rows | None = None
) -> Exchange[Averaged]:
    """Average tensors of one wide dtype, none of them empty. `turn` gives stochastic codecs new keys at each call.

    `of_means` encodes the means; without it, `codec` does.
    """
    if peers.size == 1 or not tensors:  # nothing is sent, nothing is lost
        return Averaged(dict(tensors), lambda: dict(tensors), lambda: all_finite(tensors))
    shards = known_shards(tensors, codec.row, peers.size, state)
    means, own = yield from reduce_rows(shards.rows(tensors), shards, codec, peers, turn, of_means)
    mean = shards.tensors(means, tensors)
    return Averaged(mean, lambda: shards.tensors(own(), tensors), lambda: all_finite(mean))


def reduce_rows(
    rows: Tensor, shards: Shards, codec: Rows, peers: Peers, turn: int | None = None, of_means: Rows | None = None
) -> Exchange[tuple[Tensor, Callable[[], Tensor]]]:
    """Return the means of rows [n, row], and a function that returns what this worker's messages amount to."""
    worker, workers = peers.rank, peers.size
    of_means = codec if of_means is None else of_means
    # 1. All rows are encoded, and each goes to the worker that owns it.
    mine = shards.order[shards.starts[worker] : shards.starts[worker + 1]]
    sent = codec.encode(rows, shards.counts, shards.keys(turn, worker))  # [n, bytes]
    received = yield AllToAll(sent.index_select(0, shards.order), shards.sizes)  # [workers, mine, bytes]
    parts = codec.decode(received, rows.dtype)  # [workers, mine, row]
    # 2. The owner averages its rows. Its own numbers it has exactly: it need not use its own message.
    exact = parts[worker] = rows.index_select(0, mine)  # [mine, row]
    mean_of_mine = parts.div_(workers).sum(0)
    counts = None if shards.counts is None else shards.counts[mine]
    if counts is not None:  # with 2 bits and 1 bit, no code stands for zero: padding is not decoded as zeros
        mean_of_mine[torch.arange(codec.row, device=rows.device) >= counts[:, None]] = 0
    # 3. The means are encoded, too, and go to all workers. Shards differ in size, so they are padded to the largest.
    keys = shards.keys(turn, workers)
    second = of_means.encode(mean_of_mine, counts, None if keys is None else keys[mine])
    padded = torch.nn.functional.pad(second, (0, 0, 0, shards.most - len(second)))
    gathered = yield Gather(padded)  # [workers, most, bytes]
    means = of_means.decode(gathered.flatten(0, 1).index_select(0, shards.places), rows.dtype)  # [n, row]

    def own() -> Tensor:
        amount = codec.decode(sent, rows.dtype)
        # What the second encoding loses counts as lost by the owner alone: times `workers`, as own parts are averaged.
        lost = means.index_select(0, mine).sub_(mean_of_mine)
        amount[mine] = lost.mul_(workers).add_(exact)
        return amount

    return means, own
