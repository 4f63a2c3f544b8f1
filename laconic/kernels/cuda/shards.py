"""Means in few bits on CUDA, as `laconic/codecs/shards.py` takes them: the same owners, requests and bytes.

Tensors are read and written where they are: no kernel copies them into rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.exchange import AllToAll, Averaged, Decide, Exchange, Gather, Peers, State, Tensors
from laconic.kernels.cuda import triton_rows as kernels
from laconic.kernels.cuda.collect import KINDS
from laconic.kernels.cuda.rows import rows_a_program, words_of
from laconic.packing import Shards, known_shards

_CHECK_BLOCK = 1024


@dataclass(frozen=True, eq=False)
class Messages:
    """What a worker sent and received, and the means of its own rows before they were encoded."""

    sent: Tensor
    means: Tensor
    gathered: Tensor


class ShardTiles:
    """The tensors G of one bucket, each with a tensor E of fp32, cut into tiles of rows.

    E is the residual, which is added to G (`add`), or it receives what this worker's own messages amount to.
    """

    def __init__(self, tensors: Tensors, shards: Shards, bits: int, worker: int, add: bool) -> None:
        some = next(iter(tensors.values()))
        self.bits, self.block, self.shards = bits, shards.row, shards
        self.worker, self.dtype, self.device = worker, some.dtype, some.device
        self.workers = len(shards.sizes)
        self.start, self.mine, self.most = shards.starts[worker], shards.sizes[worker], shards.most
        self.numels = [t.numel() for t in tensors.values()]
        position = shards.inverse.cpu()
        self._position = position
        self._common: dict[str, Any] = {
            "position": position.int().to(self.device), "KIND": KINDS[self.dtype], "BITS": bits,
            "BLOCK": self.block, "ROWS": rows_a_program(self.block), "ADD": add,
        }  # fmt: skip
        self._gathered_at = shards.places.int()
        self._rows = [-(-numel // self.block) for numel in self.numels]
        first_rows = [sum(self._rows[:i]) for i in range(len(self._rows))]
        self._common["tensors"] = torch.tensor(list(zip(self.numels, first_rows, strict=True))).to(self.device)
        self._known: list[int] = []
        self._aligned: list[bool] = []
        self._all: list[dict[str, Any]] = []
        self._owned: list[dict[str, Any]] = []

    def set_addresses(self, g: Sequence[Tensor], e: Sequence[Tensor]) -> None:
        """Set the tensors to work on."""
        addresses = [[t.data_ptr() for t in g], [t.data_ptr() for t in e]]
        if addresses[0] + addresses[1] == self._known:
            return
        self._known = addresses[0] + addresses[1]
        self._common["g_at"], self._common["e_at"] = (torch.tensor(each).to(self.device) for each in addresses)
        aligned = [not (a % 16 or b % 16) for a, b in zip(*addresses, strict=True)]
        if aligned != self._aligned:
            self._aligned = aligned
            self._cut()

    def _cut(self) -> None:
        """Cut the tensors into tiles: fast and other ones, of all rows and of those that this worker owns."""
        each, block = self._common["ROWS"], self.block
        tensor, first, fast, row_at = [], [], [], 0
        touched, count = [], torch.zeros(sum(self._rows) + 1, dtype=torch.int64)
        is_mine = (self._position >= self.start) & (self._position < self.start + self.mine)
        count[1:] = is_mine.cumsum(0)
        for i, (numel, rows) in enumerate(zip(self.numels, self._rows, strict=True)):
            begin = torch.arange(0, rows, each)
            tensor.append(torch.full_like(begin, i))
            first.append(begin)
            fast.append(((begin + each) * block <= numel) & self._aligned[i])
            touched.append(count[row_at + (begin + each).clamp(max=rows)] > count[row_at + begin])
            row_at += rows
        table, is_fast = torch.stack([torch.cat(tensor), torch.cat(first)]).int(), torch.cat(fast)
        owned = torch.cat(touched)
        self._all = [self._table(table[:, is_fast == each_kind], each_kind) for each_kind in (True, False)]
        self._owned = [self._table(table[:, owned & (is_fast == kind)], kind) for kind in (True, False)]

    def _table(self, table: Tensor, fast: bool) -> dict[str, Any]:
        return {"tiles": table.contiguous().to(self.device), "count": table.shape[1], "FAST": fast}

    def _launch(self, kernel: Any, tables: list[dict[str, Any]], **arguments: Any) -> None:
        for table in tables:
            if table["count"]:
                kernel[(table["count"],)](**table, **self._common, **arguments)

    def _place(self) -> dict[str, int]:
        return {"workers": self.workers, "start": self.start, "mine": self.mine}

    def reduce(self) -> Exchange[Messages]:
        """Encode and exchange, and average the rows that this worker owns. G and E are not changed."""
        width = 2 + self.block * self.bits // 8
        sent = torch.empty(sum(self.shards.sizes), width, dtype=torch.uint8, device=self.device)
        self._launch(kernels.encode_tiles, self._all, sent=sent.view(torch.int16))
        received = yield AllToAll(sent, self.shards.sizes)  # [workers, mine, bytes]
        means = torch.empty(self.mine, self.block, device=self.device)
        second = torch.empty(self.most, width, dtype=torch.uint8, device=self.device)
        second[self.mine :] = 0
        self._launch(
            kernels.average_tiles, self._owned, received=words_of(received), means=means,
            second=second.view(torch.int16), worker=self.worker, **self._place(),
        )  # fmt: skip
        gathered = yield Gather(second)  # [workers, most, bytes]
        return Messages(sent, means, gathered.contiguous())

    def finite(self, messages: Messages) -> Tensor:
        """Return a 0-d flag: whether all means are finite."""
        flag = torch.ones((), dtype=torch.int32, device=self.device)
        rows, words = self.workers * self.most, self.block * self.bits // 16
        kernels.check_steps[(-(-rows // _CHECK_BLOCK),)](
            words_of(messages.gathered), rows, flag, BITS=self.bits, WORDS=words, SIZE=_CHECK_BLOCK
        )
        return flag

    def finish(self, messages: Messages, keep: Tensor, own: bool = False) -> None:
        """Write the means over G, and over E the own part, or the new residual if the flag `keep` is set."""
        self._launch(
            kernels.finish_tiles, self._all, gathered_at=self._gathered_at, sent=words_of(messages.sent),
            gathered=words_of(messages.gathered), means=messages.means, keep=keep, OWN=own, **self._place(),
        )  # fmt: skip


def quantized_feedback(
    bits: int, block: int, tensors: Tensors, residual: dict[str, Tensor], state: State, peers: Peers
) -> Exchange[Averaged]:
    """Average `tensors` in place in few bits with error feedback, and update the residuals in place."""
    tiles = _known_tiles(bits, block, tensors, state, peers)
    for name, t in tensors.items():
        if name not in residual:
            residual[name] = torch.zeros(t.shape, dtype=torch.float32, device=t.device)
    tiles.set_addresses(list(tensors.values()), [residual[name] for name in tensors])
    messages = yield from tiles.reduce()
    ok = yield Decide(tiles.finite(messages))
    tiles.finish(messages, keep=ok.to(device=tiles.device, dtype=torch.int32))
    return Averaged(dict(tensors), lambda: dict(tensors), ok.bool, decided=True)


def _known_tiles(bits: int, block: int, tensors: Tensors, state: State, peers: Peers) -> ShardTiles:
    """Return the tiles of these tensors from a cache in the state, which is never saved."""
    shards = known_shards(tensors, block, peers.size, state)
    known: dict[tuple[str, ...], ShardTiles] = state.setdefault("_tiles", {})
    key, some = tuple(tensors), next(iter(tensors.values()))
    found = known.get(key)
    if (
        found is None
        or (found.bits, found.worker, found.dtype) != (bits, peers.rank, some.dtype)
        or found.shards is not shards
    ):
        for other in [names for names in known if not set(names).isdisjoint(key)]:
            del known[other]  # an older layout of the same tensors
        found = known[key] = ShardTiles(tensors, shards, bits, peers.rank, add=True)
    return found
