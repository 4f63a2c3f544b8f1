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
    return Averaged(mean, lambda: shards.tensors(own(), tensors), lambda: all_finite({"": means}))


def reduce_rows(
    rows: Tensor, shards: Shards, codec: Rows, peers: Peers, turn: int | None = None, of_means: Rows | None = None
) -> Exchange[tuple[Tensor, Callable[[], Tensor]]]:
    """Return the means of rows [n, row], and a function that returns what this worker's messages amount to."""
    sent = codec.encode(rows, shards.counts, shards.keys(turn, peers.rank))  # [n, bytes]
    mine = shards.owned(peers.rank).rows
    exact = rows.index_select(0, mine)
    means, own_of_mine = yield from reduce_messages(sent, exact, shards, codec, peers, turn, of_means)

    def own() -> Tensor:
        return codec.decode(sent, rows.dtype).index_copy_(0, mine, own_of_mine())

    return means, own


def reduce_messages(
    sent: Tensor,
    exact: Tensor,
    shards: Shards,
    codec: Rows,
    peers: Peers,
    turn: int | None = None,
    of_means: Rows | None = None,
) -> Exchange[tuple[Tensor, Callable[[], Tensor]]]:
    """Return the means of all rows, `sent` as messages [n, bytes]; `exact` are those that this worker owns.

    And a function that returns what this worker's messages amount to in the rows that it owns: elsewhere it is what
    they are decoded into.
    """
    worker, workers = peers.rank, peers.size
    of_means = codec if of_means is None else of_means
    mine = shards.owned(worker)
    # 1. Each row goes to the worker that owns it.
    received = yield AllToAll(sent.index_select(0, shards.order), shards.sizes)  # [workers, mine, bytes]
    # 2. The owner averages its rows. Its own numbers it has exactly: it need not use its own message.
    mean_of_mine = _mean_of(received, exact, codec, worker)  # [mine, row]
    if mine.padding is not None:  # with 2 bits and 1 bit, no code stands for zero: padding is not decoded as zeros
        mean_of_mine.view(-1).index_fill_(0, mine.padding, 0.0)
    # 3. The means are encoded, too, and go to all workers. Shards differ in size, so they are padded to the largest.
    keys = shards.keys(turn, workers)
    second = of_means.encode(mean_of_mine, mine.counts, None if keys is None else keys[mine.rows])
    if len(second) < shards.most:
        second = torch.nn.functional.pad(second, (0, 0, 0, shards.most - len(second)))
    gathered = yield Gather(second)  # [workers, most, bytes]
    means = of_means.decode(gathered.flatten(0, 1).index_select(0, shards.places), exact.dtype)  # [n, row]

    def own_of_mine() -> Tensor:
        # What the second encoding loses counts as lost by the owner alone: times `workers`, as own parts are averaged.
        return means.index_select(0, mine.rows).sub_(mean_of_mine).mul_(workers).add_(exact)

    return means, own_of_mine


def _mean_of(received: Tensor, exact: Tensor, codec: Rows, worker: int) -> Tensor:
    """Return the mean of messages [workers, n, bytes]; in place of its own message, `worker` has `exact` rows."""
    if len(received) == 2:  # a sum of two has one order, and halves are exact
        return codec.decode(received[1 - worker], exact.dtype).div_(2).add_(exact, alpha=0.5)
    parts = codec.decode(received, exact.dtype)
    parts[worker] = exact
    return parts.div_(len(received)).sum(0)
