"""`ErrorFeedback(LowRank)` on CUDA as an exchange: the host side of the Triton kernels.

What depends only on shapes and addresses (tables of tiles, flat factors) is made once for each bucket and kept in the
state under "_fused", which is never saved. Factors and residuals in the state are views of these flat tensors.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laconic.kernels import triton_low_rank as kernels
from laconic.kernels import triton_orthonormal as ortho
from laconic.kernels.choose import own_is_owed
from laconic.wires.wire import Averaged, Exchange, Mean, Request, State, Tensors

if TYPE_CHECKING:
    from laconic.codecs.low_rank import LowRank

import triton.language as tl

_GRADIENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, eq=False)
class Tiles:
    """Which matrix and place each program works on: int32 [3, tiles] on the device."""

    table: Tensor

    @property
    def count(self) -> int:
        """How many programs there are."""
        return self.table.shape[1]


class Group:
    """The matrices of one bucket: addresses, tiles and flat factors."""

    def __init__(self, tensors: Tensors, rank: int) -> None:
        some = next(iter(tensors.values()))
        self.device, self.dtype, self.rank = some.device, some.dtype, rank
        self.names = list(tensors)
        self.wide = max(16, 1 << (rank - 1).bit_length())
        self.shapes = [(t.shape[0], t.shape[1:].numel()) for t in tensors.values()]
        rows, columns = zip(*self.shapes, strict=True)
        self.rows, self.columns = self._int32(rows), self._int32(columns)
        self.p_at, self.q_at = self._int32(_starts(rows)[:-1]), self._int32(_starts(columns)[:-1])
        chunks = [-(-m // kernels.CHUNK_ROWS) for m in rows]
        parts = _starts([c * n for c, n in zip(chunks, columns, strict=True)])
        self.part_at = self._int32(parts[:-1])
        self.parts = torch.empty(parts[-1] * rank, device=self.device)
        self.row_tiles = self._tiles(kernels.PROJECT.rows, None)
        self.chunk_tiles = self._tiles(kernels.CHUNK_ROWS, kernels.REFLECT.columns)
        self.tiles = self._tiles(kernels.DELIVER.rows, None)
        self.sum_tiles = _tiles([(n * rank, 1) for _, n in self.shapes], 1024, None, self.device)
        self.p = torch.zeros(rank, sum(rows), device=self.device)
        self.q = torch.zeros(rank, sum(columns), device=self.device)
        self.constants = {"GRADIENT": _GRADIENTS[self.dtype], "RANK": rank, "WIDE": self.wide}
        self.orthonormal_p = Orthonormal(rows, rank, self.wide, self.device)
        self.orthonormal_q = Orthonormal(columns, rank, self.wide, self.device)
        self.always = torch.ones((), dtype=torch.int32, device=self.device)
        self.addresses: list[int] = []
        self.g_at = self.e_at = self._int32([])

    def aim(self, tensors: Tensors, residual: Mapping[str, Tensor]) -> None:
        """Note where gradients and residuals lie, if that has changed."""
        now = [t.data_ptr() for t in tensors.values()] + [residual[name].data_ptr() for name in self.names]
        if now != self.addresses:
            self.addresses = now
            table = torch.tensor(now, dtype=torch.int64).to(self.device)
            self.g_at, self.e_at = table[: len(self.names)], table[len(self.names) :]

    def views(self, flat: Tensor, sizes: list[int]) -> dict[str, Tensor]:
        """Cut a factor of all matrices into one view of [rows or columns, rank] for each."""
        return dict(zip(self.names, (x.t() for x in flat.split(sizes, dim=1)), strict=True))

    def project(self, q: Tensor, p: Tensor) -> None:
        """P = (G + E) Q."""
        kernels.project[(self.row_tiles.count,)](
            self.row_tiles.table, self.row_tiles.count, self.g_at, self.e_at, self.rows, self.columns, self.p_at,
            self.q_at, q, q.shape[1], p, p.shape[1], **self.constants, **kernels.PROJECT.options,
        )  # fmt: skip

    def reflect(self, p: Tensor, q: Tensor) -> None:
        """Q = (G + E)ᵀ P."""
        kernels.reflect[(self.chunk_tiles.count,)](
            self.chunk_tiles.table, self.chunk_tiles.count, self.g_at, self.e_at, self.rows, self.columns, self.p_at,
            self.part_at, p, p.shape[1], self.parts, CHUNK=kernels.CHUNK_ROWS, **self.constants,
            **kernels.REFLECT.options,
        )  # fmt: skip
        kernels.add_parts[(self.sum_tiles.count,)](
            self.sum_tiles.table, self.sum_tiles.count, self.rows, self.columns, self.q_at, self.part_at, self.parts, q,
            q.shape[1], RANK=self.rank, SIZE=1024, CHUNK=kernels.CHUNK_ROWS,
        )  # fmt: skip

    def deliver(self, u: Tensor, v: Tensor, own_u: Tensor, own_v: Tensor, good: Tensor) -> None:
        """G = U Vᵀ, E = G + E − U' V'ᵀ."""
        kernels.deliver[(self.tiles.count,)](
            self.tiles.table, self.tiles.count, self.g_at, self.e_at, self.rows, self.columns, self.p_at, self.q_at,
            u, v, own_u, own_v, u.shape[1], v.shape[1], good, **self.constants,
            **kernels.DELIVER.options,
        )  # fmt: skip

    def _int32(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device)

    def _tiles(self, rows: int, columns: int | None) -> Tiles:
        return _tiles(self.shapes, rows, columns, self.device)


class Orthonormal:
    """Makes the columns of many thin matrices, one below the other, orthonormal."""

    def __init__(self, rows: tuple[int, ...], rank: int, wide: int, device: torch.device) -> None:
        self.rank, self.wide = rank, wide
        tile = ortho.ROWS_A_TILE
        places = [(i, y) for i, m in enumerate(rows) for y in range(0, m, tile)]
        self.count, self.matrices = len(places), len(rows)
        self.tiles = torch.tensor(places, dtype=torch.int32).t().contiguous().to(device)
        first = _starts([-(-m // tile) for m in rows])
        self.first = torch.tensor(first, dtype=torch.int32).to(device)
        self.rows = torch.tensor(rows, dtype=torch.int32).to(device)
        self.row_at = torch.tensor(_starts(rows)[:-1], dtype=torch.int32).to(device)
        self.tops = torch.empty(self.count, wide, device=device)
        self.usable = torch.empty(self.matrices, dtype=torch.int32, device=device)
        self.grams = torch.empty(self.count, wide, wide, device=device)
        self.weights = torch.empty(self.matrices, wide, wide, device=device)
        self.dropped = torch.empty(self.matrices, wide, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor, into: Tensor, good: Tensor) -> None:
        """Write orthonormal columns that span those of `x` to `into`; not for zeros or NaN, nor unless `good`."""
        sizes = {"RANK": self.rank, "WIDE": self.wide}
        place = (self.tiles, self.count, self.rows, self.row_at, x.shape[1])
        work = torch.empty_like(x)
        ortho.largest[(self.count,)](*place, x, self.tops, ROWS=ortho.ROWS_A_TILE, **sizes)
        ortho.scales[(self.matrices,)](
            self.first, self.tops, self.weights, self.dropped, self.usable, TILES=64, **sizes
        )
        source = x
        for number in range(ortho.PASSES + 1):  # the first only scales
            last = number == ortho.PASSES
            ortho.apply[(self.count,)](
                *place, source, self.weights, self.dropped, self.usable, good, into if last else work, self.grams,
                LAST=last, ROWS=ortho.ROWS_A_TILE, **sizes,
            )  # fmt: skip
            source = work
            if not last:
                ortho.inverse[(self.matrices,)](
                    self.first,
                    self.grams,
                    self.weights,
                    self.dropped,
                    LEAST=1e-6,
                    LAST=number == ortho.PASSES - 1,
                    **sizes,
                )


def fused_feedback(codec: LowRank, tensors: Tensors, residual: dict[str, Tensor], state: State) -> Exchange:
    """Average `tensors` in place through `codec` with error feedback; the residual is what this worker still owes."""
    group = _group(codec, tensors, residual, state)
    if codec.rounds == "two":
        good = yield from _two_rounds(group)
    else:
        good = yield from _one_factor(group, state)
    return Averaged(dict(tensors), own_is_owed, lambda: good.bool())


def _two_rounds(group: Group) -> Generator[Request, Tensor, Tensor]:
    p, q = torch.empty_like(group.p), torch.empty_like(group.q)
    group.project(group.q, p)
    p = yield Mean(p)
    group.orthonormal_p(p, group.p, group.always)
    group.reflect(group.p, q)
    own = q.clone()
    q = yield Mean(q)
    good = (torch.isfinite(p.sum()) & torch.isfinite(q.sum())).to(torch.int32)
    group.deliver(group.p, q, group.p, own, good)
    group.orthonormal_q(q, group.q, good)
    return good


def _one_factor(group: Group, state: State) -> Generator[Request, Tensor, Tensor]:
    turns: dict[str, int] = state.setdefault("turn", {})
    odd = turns.get(group.names[0], 0) % 2 == 1
    own = torch.empty_like(group.q if odd else group.p)
    if odd:
        group.reflect(group.p, own)
    else:
        group.project(group.q, own)
    heard = yield Mean(own.clone())
    good = torch.isfinite(heard.sum()).to(torch.int32)
    if odd:
        group.deliver(group.p, heard, group.p, own, good)
        group.orthonormal_q(heard, group.q, good)
    else:
        group.deliver(heard, group.q, own, group.q, good)
        group.orthonormal_p(heard, group.p, good)
    turns.update({name: turns.get(name, 0) + 1 for name in group.names})
    return good


def _group(codec: LowRank, tensors: Tensors, residual: dict[str, Tensor], state: State) -> Group:
    groups: dict[tuple[str, ...], Group] = state.setdefault("_fused", {})
    key = tuple(tensors)
    group = groups.get(key)
    known_p, known_q = state.setdefault("p", {}), state.setdefault("q", {})
    if group is None or group.dtype != next(iter(tensors.values())).dtype:
        group = groups[key] = Group(tensors, codec.rank)
        p_views = group.views(group.p, [m for m, _ in group.shapes])
        q_views = group.views(group.q, [n for _, n in group.shapes])
        for name, t in tensors.items():
            if name not in residual:
                residual[name] = torch.zeros(t.shape, dtype=torch.float32, device=t.device)
            q_views[name].copy_(codec.start(name, t.shape, state, t))
            if name in known_p:
                p_views[name].copy_(known_p[name])
        group.orthonormal_q(group.q.clone(), group.q, group.always)
        if all(name in known_p for name in group.names):
            group.orthonormal_p(group.p.clone(), group.p, group.always)
        known_p.update(p_views)
        known_q.update(q_views)
        for other in [k for k in groups if k != key and set(k) & set(key)]:
            del groups[other]  # an older layout of the same matrices
    group.aim(tensors, residual)
    return group


def _tiles(shapes: Sequence[tuple[int, int]], rows: int, columns: int | None, device: torch.device) -> Tiles:
    """Cut each matrix into tiles of `rows` and `columns`, or whole rows."""
    places = [
        (i, y, x)
        for i, (m, n) in enumerate(shapes)
        for y in range(0, m, rows)
        for x in range(0, n, n if columns is None else columns)
    ]
    return Tiles(torch.tensor(places, dtype=torch.int32).t().contiguous().to(device))


def _starts(sizes: Any) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts
