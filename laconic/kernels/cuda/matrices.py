"""The matrices of one bucket on CUDA: tables, flat factors, messages, and the launches over them.

All of it is built once; a step only launches. The addresses of gradients and residuals are in a table on the device,
so the launches stay the same when these addresses change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from torch import Tensor

from laconic.exchange import Tensors
from laconic.kernels.cuda import launches
from laconic.kernels.cuda import triton_low_rank as kernels
from laconic.kernels.cuda.collect import Collection
from laconic.kernels.cuda.launches import Launch
from laconic.kernels.cuda.orthonormal import Orthonormal
from laconic.kernels.cuda.shards import ShardTiles
from laconic.packing import Shards

if TYPE_CHECKING:
    from laconic.codecs.low_rank import LowRank

_GRADIENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_SUM_BLOCK = 1024
_CHECK_BLOCK = 4096


class BucketMatrices:
    """The matrices of one bucket, which share one message, and the small tensors that are sent exactly with them."""

    def __init__(self, codec: LowRank, matrices: Tensors, rest: Tensors) -> None:
        some = next(iter(matrices.values()))
        self.codec, self.device, self.dtype = codec, some.device, some.dtype
        self.names, self.rest_names = list(matrices), list(rest)
        self.shapes = [(t.shape[0], t.shape[1:].numel()) for t in matrices.values()]
        rows, columns = zip(*self.shapes, strict=True)
        rank, alternating = codec.rank, codec.rounds == "alternating"
        self.chunk = kernels.CHUNK_ROWS
        parts = [-(-m // self.chunk) * n for m, n in self.shapes]
        p_at, q_at, part_at = self._at = _places(rows, rows), _places(columns, columns), _places(parts, columns)
        self.matrices = self._table(list(zip(rows, columns, p_at, q_at, part_at, strict=True)), torch.int32)
        self.p = torch.zeros(rank * sum(rows), device=self.device)
        self.q = torch.zeros(rank * sum(columns), device=self.device)
        # Two rounds need the new P for Q, before it is known whether it may be kept.
        self.new_p = self.p if alternating else torch.zeros_like(self.p)
        self.p_views = [self.p[rank * at :][: rank * m].view(rank, m).t() for m, at in zip(rows, p_at, strict=True)]
        self.q_views = [self.q[rank * at :][: rank * n].view(rank, n).t() for n, at in zip(columns, q_at, strict=True)]
        self.collection = Collection(rest) if rest else None
        tail = 0 if self.collection is None else self.collection.numel
        longest = max(self.p.numel(), self.q.numel())
        # One message is in flight at a time, of P or of Q.
        message = torch.empty(longest + tail, device=self.device)
        self.p_message = message[: self.p.numel() + tail]
        self.q_message = message[: self.q.numel() + (tail if alternating else 0)]
        own = torch.empty(longest if alternating else self.q.numel(), device=self.device)
        self.own_p = own[: self.p.numel()] if alternating else self.p_message
        self.own_q = own[: self.q.numel()]
        self.finite = torch.ones((), dtype=torch.int32, device=self.device)
        """Whether the messages of this exchange were finite."""
        self.keep = torch.ones((), dtype=torch.int32, device=self.device)
        """The same, until the caller writes into it whether all exchanges of the step are finite."""
        self.always = torch.ones((), dtype=torch.int32, device=self.device)
        self.never = torch.zeros_like(self.always)
        # `parts` are summed before `Orthonormal` uses the same memory.
        self.parts = torch.empty(max(rank * sum(parts), longest), device=self.device)
        self.orthonormal_p = Orthonormal(rows, p_at, rank, self.parts[:longest])
        self.orthonormal_q = Orthonormal(columns, q_at, rank, self.parts[:longest])
        self.g_at = torch.zeros(len(self.names), dtype=torch.int64, device=self.device)
        self.e_at = torch.zeros_like(self.g_at)
        self._known: list[int] = []
        self._aligned: list[bool] = []
        self._sequences: dict[str, launches.Sequence] = {}
        self._shards: dict[tuple[str, int, int], ShardTiles] = {}

    def set_addresses(self, matrices: Tensors, residual: Mapping[str, Tensor], rest: Tensors) -> None:
        """Update the tables of addresses if they have changed."""
        g = [t.data_ptr() for t in matrices.values()]
        e = [residual[name].data_ptr() for name in self.names]
        if self.collection is not None:
            self.collection.set_addresses(rest.values())
        if g + e == self._known:
            return
        self._known = g + e
        self.g_at.copy_(self._table(g, torch.int64))
        self.e_at.copy_(self._table(e, torch.int64))
        step = 16 // self.dtype.itemsize
        aligned = [
            not (n % step or a % 16 or b % 16) for (_, n), a, b in zip(self.shapes, g, e, strict=True)
        ]  # rows start at multiples of 16 bytes
        if aligned != self._aligned:
            self._aligned, self._sequences = aligned, {}

    def run(self, phase: str) -> None:
        """Launch a phase: "first" before a message, "between" two, "check" after it, and "last" once `keep` is known.

        All but "between" are those "p" or "q": "first p".
        """
        sequence = self._sequences.get(phase)
        if sequence is None:
            make = {
                "first p": self._first_p, "first q": self._first_q, "between": self._between,
                "check p": self._check_p, "check q": self._check_q, "last p": self._last_p, "last q": self._last_q,
            }[phase]  # fmt: skip
            sequence = self._sequences[phase] = launches.Sequence(make())
        sequence()

    def shards(self, side: str, worker: int, workers: int) -> ShardTiles:
        """Return the factors of the message "p" or "q" in few bits: for each of them its own part, as far as needed."""
        key = (side, worker, workers)
        if key not in self._shards:
            message, own = (self.p_message, self.own_p) if side == "p" else (self.q_message, self.own_q)
            factors, own_parts = self._factors(message, side), self._factors(own, side)
            codec = self.codec.of_factors
            tiles = ShardTiles(factors, Shards(factors, codec.block, workers), codec.bits, worker, add=False)
            tiles.set_addresses(list(factors.values()), list(own_parts.values()))
            self._shards[key] = tiles
        return self._shards[key]

    def _factors(self, flat: Tensor, side: str) -> dict[str, Tensor]:
        """Return views of a flat tensor of factors, [rank, rows or columns] each."""
        rank, (p_at, q_at, _) = self.codec.rank, self._at
        places = zip(self.names, self.shapes, p_at if side == "p" else q_at, strict=True)
        lengths = {name: (shape[0 if side == "p" else 1], at) for name, shape, at in places}
        return {name: flat[rank * at :][: rank * m].view(rank, m) for name, (m, at) in lengths.items()}

    def _first_p(self) -> list[Launch]:
        return [*self._gather(self.p_message), *self._compute_p()]

    def _first_q(self) -> list[Launch]:
        return [*self._gather(self.q_message), *self._compute_q(first=True)]

    def _between(self) -> list[Launch]:
        received = [self._check(self.p_message), *self._scatter(self.p_message)]
        return [*received, *self.orthonormal_p(self.p_message, self.new_p, self.finite), *self._compute_q(first=False)]

    def _check_p(self) -> list[Launch]:
        return [self._check(self.p_message), *self._scatter(self.p_message)]

    def _check_q(self) -> list[Launch]:
        return [self._check(self.q_message), *(self._scatter(self.q_message) if self._alternating else [])]

    def _last_p(self) -> list[Launch]:
        written = self._reconstruct(self.p_message, self.q, self.own_p, left=True)
        return [*written, *self.orthonormal_p(self.p_message, self.p, self.keep)]

    def _last_q(self) -> list[Launch]:
        written = self._reconstruct(self.new_p, self.q_message, self.own_q, left=False)
        return [*written, *self._keep_p(), *self.orthonormal_q(self.q_message, self.q, self.keep)]

    def _keep_p(self) -> list[Launch]:
        """Make P the new one, or the new one P, as `keep` says."""
        if self._alternating:
            return []
        count = self.p.numel()
        arguments = {"new": self.new_p, "old": self.p, "count": count, "keep": self.keep, "SIZE": _CHECK_BLOCK}
        return [Launch(kernels.keep_one, -(-count // _CHECK_BLOCK), arguments, {})]

    @property
    def _alternating(self) -> bool:
        """Whether a step has one round, not two."""
        return self.codec.rounds == "alternating"

    @property
    def _stores_m(self) -> bool:
        """Whether the first of two rounds stores M over G, which saves two passes over E."""
        return not self._alternating and self.dtype == torch.float32

    def _gather(self, message: Tensor) -> list[Launch]:
        if self.collection is None:
            return []
        return [self.collection.launch(message[message.numel() - self.collection.numel :], gather=True)]

    def _scatter(self, message: Tensor) -> list[Launch]:
        if self.collection is None:
            return []
        tail = message[message.numel() - self.collection.numel :]
        return [self.collection.launch(tail, gather=False, finite=self.finite)]

    def _check(self, message: Tensor) -> Launch:
        arguments = {
            "x": message, "count": message.numel(), "finite": self.finite, "keep": self.keep, "SIZE": _CHECK_BLOCK,
        }  # fmt: skip
        return Launch(kernels.clear_if_nonfinite, -(-message.numel() // _CHECK_BLOCK), arguments, {})

    def _compute_p(self) -> list[Launch]:
        """Compute P = (G + E) Q."""
        blocks = kernels.blocks(kernels.COMPUTE_P_AND_M if self._stores_m else kernels.COMPUTE_P, self.codec.rank)
        arguments = {
            "q": self.q, "p": self.p_message, "own": self.own_p, "finite": self.finite, "keep": self.keep,
            "STORE_M": self._stores_m,
        }  # fmt: skip
        return self._launch_over_tiles(kernels.compute_p, blocks, (blocks.rows, None), arguments)

    def _compute_q(self, first: bool) -> list[Launch]:
        """Compute Q = (G + E)ᵀ P."""
        blocks = kernels.blocks(kernels.COMPUTE_Q, self.codec.rank)
        arguments = {
            "p": self.new_p, "parts": self.parts, "finite": self.finite, "keep": self.keep, "CHUNK": self.chunk,
            "ADD": not self._stores_m, "FIRST": first,
        }  # fmt: skip
        # Backwards: the last tiles of the kernel before are still in the cache.
        tiles = self._launch_over_tiles(
            kernels.compute_q, blocks, (self.chunk, blocks.columns), arguments, backwards=True
        )
        thin = [(n * self.codec.rank, 1) for _, n in self.shapes]
        sum_tiles = self._tiles(range(len(thin)), _SUM_BLOCK, None, thin)
        sums = {
            "tiles": sum_tiles, "count": sum_tiles.shape[1], "matrices": self.matrices, "parts": self.parts,
            "q": self.q_message, "own": self.own_q, "RANK": self.codec.rank, "SIZE": _SUM_BLOCK, "CHUNK": self.chunk,
        }  # fmt: skip
        return [*tiles, Launch(kernels.sum_parts, sum_tiles.shape[1], sums, {})]

    def _reconstruct(self, u: Tensor, v: Tensor, own: Tensor, left: bool) -> list[Launch]:
        """Compute G = U Vᵀ and E = G + E − U' V'ᵀ."""
        blocks = kernels.blocks(kernels.RECONSTRUCT_FROM_M if self._stores_m else kernels.RECONSTRUCT, self.codec.rank)
        arguments = {
            "u": u, "v": v, "own": own, "finite": self.finite, "keep": self.keep, "ADD": not self._stores_m,
            "LEFT": left, "DOT": blocks.dot, "ONE_TILE": blocks.one_tile,
        }  # fmt: skip
        cut = (blocks.rows, blocks.columns if blocks.one_tile else None)
        return self._launch_over_tiles(kernels.reconstruct, blocks, cut, arguments, backwards=left)

    def _launch_over_tiles(
        self, kernel: Any, blocks: kernels.Blocks, cut: tuple[int, int | None], arguments: dict[str, Any],
        backwards: bool = False,
    ) -> list[Launch]:  # fmt: skip
        """Return one launch over all aligned matrices, and one over the others."""
        found = []
        for aligned in (True, False):
            members = [i for i, each in enumerate(self._aligned) if each == aligned]
            tiles = self._tiles(members, *cut, self.shapes, backwards)
            common = {
                "tiles": tiles, "count": tiles.shape[1], "matrices": self.matrices, "g_at": self.g_at,
                "e_at": self.e_at, "GRADIENT": _GRADIENTS[self.dtype], "ALIGNED": aligned,
                "RANK": self.codec.rank, "PADDED_RANK": max(16, 1 << (self.codec.rank - 1).bit_length()),
                "ROWS": blocks.rows, "COLUMNS": blocks.columns,
            }  # fmt: skip
            options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
            found.append(Launch(kernel, tiles.shape[1], common | arguments, options))
        return found

    def _tiles(
        self, members: Sequence[int], rows: int, columns: int | None, shapes: Sequence[tuple[int, int]],
        backwards: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return a table of tiles of `rows` and `columns`, or whole rows: matrix, first row, first column of each."""
        places = [
            (i, y, x)
            for i in members
            for y in range(0, shapes[i][0], rows)
            for x in range(0, shapes[i][1], columns or shapes[i][1])
        ]
        return self._table(places[::-1] if backwards else places, torch.int32).view(-1, 3).t().contiguous()

    def _table(self, values: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device)


def _places(sizes: Sequence[int], widths: Sequence[int]) -> list[int]:
    """Return offsets of concatenated blocks: widths divisible by 4 first, so that their offsets are divisible by 4."""
    places, at = [0] * len(sizes), 0
    for i in sorted(range(len(sizes)), key=lambda i: widths[i] % 4 > 0):
        places[i] = at
        at += sizes[i]
    return places
