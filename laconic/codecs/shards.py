"""The mean of tensors that travel in few bits: every worker averages one shard of each tensor.

A tensor is cut into rows, and each worker owns some of the rows. All workers encode all rows and send them to their
owners (all_to_all). An owner adds the others' rows to its own, which it has exactly, encodes the means, and sends
them to all (all_gather). So a worker sends 2(p−1)/p encoded copies for any number of workers p, as a ring all_reduce.

What the second encoding loses, only the owner knows: it counts as lost by its own message, so error feedback keeps it.
Who owns what depends on names and shapes alone, never on the bucket: a resumed run repeats the bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from laconic.exchange import AllToAll, Exchange, Gather, Peers, State, Tensors


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


@dataclass(frozen=True, eq=False)
class Reduced:
    """The mean of tensors over all workers, and a function that returns what this worker's messages amount to."""

    mean: dict[str, Tensor]
    own: Callable[[], dict[str, Tensor]]


def reduce_in_shards(
    tensors: Tensors, codec: Rows, state: State, peers: Peers, turn: int | None = None
) -> Exchange[Reduced]:
    """Average tensors of one wide dtype, none of them empty. `turn` gives stochastic codecs new keys at each call."""
    worker, workers = peers.rank, peers.size
    if workers == 1 or not tensors:  # nothing is sent, nothing is lost
        return Reduced(dict(tensors), lambda: dict(tensors))
    shards = known_shards(tensors, codec.row, workers, state)
    mine = shards.order[shards.starts[worker] : shards.starts[worker + 1]]
    rows = shards.rows(tensors)
    sent = codec.encode(rows, shards.counts, shards.keys(turn, worker))
    parts = codec.decode((yield AllToAll(sent[shards.order], shards.sizes)), rows.dtype)  # [workers, mine, row]
    exact = parts[worker] = rows[mine]
    mean_of_mine = parts.div_(workers).sum(0)
    counts = None if shards.counts is None else shards.counts[mine]
    if counts is not None:  # with 2 bits and 1 bit, no code stands for zero: padding is not decoded as zeros
        mean_of_mine[torch.arange(codec.row, device=rows.device) >= counts[:, None]] = 0
    keys = shards.keys(turn, workers)
    second = codec.encode(mean_of_mine, counts, None if keys is None else keys[mine])
    padded = torch.nn.functional.pad(second, (0, 0, 0, shards.most - len(second)))
    gathered = yield Gather(padded)  # [workers, most, bytes]
    means = codec.decode(gathered.flatten(0, 1)[shards.places], rows.dtype)

    def own() -> dict[str, Tensor]:
        amount = codec.decode(sent, rows.dtype)
        amount[mine] = exact + workers * (means[mine] - mean_of_mine)
        return shards.tensors(amount, tensors)

    return Reduced(shards.tensors(means, tensors), own)


class Shards:
    """The rows of some tensors, and who owns which."""

    def __init__(self, tensors: Tensors, row: int, workers: int) -> None:
        device = next(iter(tensors.values())).device
        self.row, self.shapes = row, {name: t.shape for name, t in tensors.items()}
        owners, counts, keys = [], [], []
        sizes = torch.zeros(workers, dtype=torch.int64)
        for name, shape in self.shapes.items():
            rows, key = -(-shape.numel() // row), zlib.crc32(name.encode())
            index, bounds = torch.arange(rows, device=device), torch.arange(workers + 1) * rows // workers
            part = ((index + 1) * workers - 1) // max(1, rows)  # part p ends at bounds[p + 1]
            owners.append((part + key) % workers)  # so that small tensors are spread
            sizes += bounds.diff().roll(key % workers)
            counts += [torch.full((rows - 1,), row), torch.tensor([shape.numel() - (rows - 1) * row])]
            keys.append(index + (key << 24))
        self.sizes: tuple[int, ...] = tuple(sizes.tolist())
        self.starts = [0, *accumulate(self.sizes)]
        self.most = max(self.sizes)
        owner, starts = torch.cat(owners), torch.tensor(self.starts, device=device)
        self.order = owner.argsort(stable=True)
        self.inverse = self.order.argsort()
        self.places = owner * self.most + self.inverse - starts[owner]
        """Where each row is among the gathered shards, each of which is padded to `most` rows."""
        is_padded = any(shape.numel() % row for shape in self.shapes.values())
        self.counts = torch.cat(counts).to(device) if is_padded else None
        self._keys = torch.cat(keys)

    def keys(self, turn: int | None, worker: int) -> Tensor | None:
        """Return a number for each row that no other row, turn or worker has; None without a turn."""
        return None if turn is None else self._keys + ((turn << 12) + worker) * 0x9E3779B1

    def rows(self, tensors: Tensors) -> Tensor:
        """Copy tensors into rows [n, row], each tensor padded with zeros."""
        pieces: list[Tensor] = []
        for t in tensors.values():
            pieces.append(t.reshape(-1))
            if t.numel() % self.row:
                pieces.append(t.new_zeros(-t.numel() % self.row))
        return torch.cat(pieces).view(-1, self.row)

    def tensors(self, rows: Tensor, like: Tensors) -> dict[str, Tensor]:
        """Undo `rows`: views of it."""
        flat, at, found = rows.view(-1), 0, {}
        for name, t in like.items():
            found[name] = flat[at : at + t.numel()].view(t.shape)
            at += -(-t.numel() // self.row) * self.row
        return found


def known_shards(tensors: Tensors, row: int, workers: int, state: State) -> Shards:
    """Return the shards of these tensors from a cache in the state, which is never saved."""
    known: dict[tuple[tuple[str, torch.Size], ...], Shards] = state.setdefault("_shards", {})
    key = tuple((name, t.shape) for name, t in tensors.items())  # one name has two shapes if its factors are averaged
    found = known.get(key)
    device = next(iter(tensors.values())).device
    if found is None or (found.row, len(found.sizes), found.order.device) != (row, workers, device):
        for other in [names for names in known if not set(names).isdisjoint(key)]:
            del known[other]  # an older layout of the same tensors
        found = known[key] = Shards(tensors, row, workers)
    return found
