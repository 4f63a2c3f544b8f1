"""PowerSGD: each matrix is sent as two thin factors (Vogels et al. 2019, arXiv:1905.13727).

`rounds="two"` is the paper's Algorithm 1: every call averages P, then Q. `rounds="alternating"` averages P on even
turns and Q on odd turns: half the bytes and one round, as in the authors' current code and in ACP-SGD (Zhang et al.
2023, arXiv:2306.08881).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from laconic.codecs.contract import keep_if
from laconic.codecs.quantized import Quantized, check_bits
from laconic.codecs.shards import reduce_in_shards
from laconic.exchange import Averaged, Decide, Exchange, Mean, Peers, State, Tensors, all_finite, true
from laconic.kernels.orthonormal import orthonormal_all
from laconic.packing import aligned, narrowed, pack, unpack, wide_dtype
from laconic.values import as_code, is_number, is_whole


@dataclass(frozen=True, repr=False)
class LowRank:
    """PowerSGD: each matrix is sent as two thin factors.

    An [m, n] matrix costs rank * (m + n) numbers instead of m * n, or half of that with `rounds="alternating"`.
    A tensor of more dimensions is treated as [first, all others]. The result is biased, so wrap it in `ErrorFeedback`.
    Matrices that would not shrink more than `min_compression` times are declined. All arithmetic is in fp32.
    With `bits`, the factors travel in 8, 4 or 2 bits a number (`shards.py`): ranks and bits multiply.
    """

    rank: int
    min_compression: float = 2
    rounds: Literal["two", "alternating"] = "two"
    warm_start: bool = True
    seed: int = 0
    bits: int | None = None

    __repr__ = as_code

    def __post_init__(self) -> None:
        check_bits("LowRank", self.bits, (None, 8, 4, 2))
        _check_types(self.rank, self.min_compression, self.warm_start, self.seed)
        if self.rank < 1:
            raise ValueError(f"LowRank(rank={self.rank}): rank must be at least 1. To send all, use Exact().")
        if self.min_compression < 0:
            raise ValueError(
                f"LowRank(min_compression={self.min_compression}): it must not be negative. To compress all, use 0."
            )
        if self.rounds not in ("two", "alternating"):
            raise ValueError(f'LowRank(rounds={self.rounds!r}): rounds must be "two" or "alternating".')
        if self.rounds == "alternating" and not self.warm_start:
            raise ValueError(
                'LowRank(rounds="alternating", warm_start=False): alternating sends one factor and reuses the other '
                'from the last call, which is the warm start. Use rounds="two" to start each call from random factors.'
            )

    def accepts(self, shape: torch.Size) -> bool:
        """Accept matrices that shrink enough."""
        if len(shape) < 2 or shape.numel() == 0:
            return False
        rows, columns = shape[0], shape[1:].numel()
        rank = min(self.rank, rows, columns)
        return rank * (rows + columns) * self.min_compression < rows * columns

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        """Average low-rank approximations of the matrices."""
        matrices = {name: _matrix(self, name, t) for name, t in tensors.items()}  # [rows, columns] each
        if not matrices:
            return Averaged({}, dict, true)
        factors = Factors(state)
        if self.rounds == "two":
            mean, own, ok = yield from self._two_rounds(matrices, factors, peers)
        else:
            mean, own, ok = yield from self._one_round(matrices, factors, peers)
        # On an accelerator, reading `ok` would wait for the device, so the turn always advances there.
        if ok.device.type != "cpu" or bool(ok):
            factors.advance(matrices)
        return Averaged(_products(mean, tensors), lambda: _products(own(), tensors), lambda: ok, decided=True)

    def _two_rounds(self, matrices: dict[str, Tensor], factors: Factors, peers: Peers) -> _Rounds:
        # 1. P = M Q, with last call's Q, and its mean
        before = {name: self.first_q(name, m.shape, factors, m) for name, m in matrices.items()}
        q = orthonormal_all(before)
        own_p = {name: aligned(m) @ q[name] for name, m in matrices.items()}  # [rows, rank]
        p = orthonormal_all((yield from self.reduce(own_p, factors, peers)).mean)
        # 2. Q = Mᵀ P, with the mean P, whose columns are orthonormal: P Qᵀ is then the projection of M
        own_q = {name: m.T @ p[name] for name, m in matrices.items()}  # [columns, rank]
        reduced = yield from self.reduce(own_q, factors, peers)
        q = {name: x.contiguous() for name, x in reduced.mean.items()}
        # 3. both are kept for the next call, if the whole step is finite
        ok = yield Decide(all_finite(q))
        if self.warm_start:
            factors.q.update(_usable(q, before, ok))
            zeros = {name: torch.zeros_like(x) for name, x in p.items()}
            factors.p.update(_usable(p, zeros | factors.p, ok))
        return _pairs(p, q), lambda: _pairs(p, reduced.own()), ok

    def _one_round(self, matrices: dict[str, Tensor], factors: Factors, peers: Peers) -> _Rounds:
        """Send P = M Q on even turns and Q = Mᵀ P on odd turns; all workers hold the other factor already."""
        even = {name: m for name, m in matrices.items() if not factors.sends_q(name)}
        odd = {name: m for name, m in matrices.items() if name not in even}
        # 1. the factor that all hold is made orthonormal, and the other one computed and averaged
        q = orthonormal_all({name: self.first_q(name, m.shape, factors, m) for name, m in even.items()})
        p = orthonormal_all({name: factors.p[name] for name in odd})
        own_p = {name: aligned(m) @ q[name] for name, m in even.items()}  # [rows, rank]
        own_q = {name: m.T @ p[name] for name, m in odd.items()}  # [columns, rank]
        reduced = yield from self.reduce(own_p | own_q, factors, peers)
        mean = {name: x.contiguous() for name, x in reduced.mean.items()}
        # 2. what was averaged is kept, if the whole step is finite
        ok = yield Decide(all_finite(mean))
        mean_p = {name: mean[name] for name in even}
        mean_q = {name: mean[name] for name in odd}
        zeros = {name: torch.zeros_like(x) for name, x in mean_p.items() if name not in factors.p}
        factors.p.update(_usable(mean_p, factors.p | zeros, ok))
        factors.q.update(_usable(mean_q, factors.q, ok))
        first = {name: x for name, x in q.items() if name not in factors.q}
        factors.q.update(first if ok.device.type != "cpu" or bool(ok) else {})

        def own() -> _Pairs:
            sent = reduced.own()
            return _pairs({n: sent[n] for n in even} | p, q | {n: sent[n] for n in odd})

        return _pairs(mean_p | p, q | mean_q), own, ok

    def reduce(self, own: dict[str, Tensor], factors: Factors, peers: Peers) -> Exchange[Averaged]:
        """Average thin factors [rows or columns, rank] over all workers, in few bits if `bits` says so."""
        if self.bits is None:
            flat = yield Mean(pack(own))
            return Averaged(unpack(flat, like=own), lambda: own, lambda: all_finite({"": flat}))
        # Transposed, so that the numbers of a block belong to one column: columns differ in size.
        turned = {name: x.T.contiguous() for name, x in own.items()}
        reduced = yield from reduce_in_shards(turned, self.of_factors, factors.state, peers)
        back = {name: x.T for name, x in reduced.mean.items()}
        return Averaged(back, lambda: {name: x.T for name, x in reduced.own().items()}, reduced.finite)

    @cached_property
    def of_factors(self) -> Quantized:
        """The codec of the factors' numbers, where `bits` is given."""
        return Quantized(self.bits or 8)

    def may_fuse(self, tensors: Tensors, factors: Factors) -> bool:
        """Return whether all matrices are contiguous and send the same factor at this call, as fused paths need it."""
        if not self.warm_start or not all(t.is_contiguous() for t in tensors.values()):
            return False
        return self.rounds == "two" or factors.in_step(tensors)

    def first_q(self, name: str, shape: torch.Size, factors: Factors, like: Tensor) -> Tensor:
        """Return the Q to start from, [columns, rank]: the last one, or a random one, equal on all workers."""
        known = factors.q
        if self.warm_start and name in known:
            return known[name]
        rows, columns = shape[0], shape[1:].numel()
        if like.device.type == "meta":  # bytes are counted
            return like.new_empty(columns, min(self.rank, rows, columns), dtype=wide_dtype(like.dtype))
        turn = 0 if self.warm_start else factors.turn(name)
        digest = hashlib.sha256(f"{self.seed}/{name}/{turn}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
        dtype = wide_dtype(like.dtype)
        return torch.randn(columns, min(self.rank, rows, columns), generator=generator, dtype=dtype).to(like.device)


@dataclass(frozen=True, eq=False)
class Factors:
    """A view of the state dict of `LowRank`, by parameter name: only this class knows the keys of the dict."""

    state: State

    @property
    def p(self) -> dict[str, Tensor]:
        """The last P of each matrix, [rows, rank]."""
        p: dict[str, Tensor] = self.state.setdefault("p", {})
        return p

    @property
    def q(self) -> dict[str, Tensor]:
        """The last Q of each matrix, [columns, rank]."""
        q: dict[str, Tensor] = self.state.setdefault("q", {})
        return q

    def turn(self, name: str) -> int:
        """Return the number of calls that updated the matrix `name`."""
        turn: int = self.state.get("turn", {}).get(name, 0)
        return turn

    def sends_q(self, name: str) -> bool:
        """Return whether alternating rounds send Q at this call (odd turns), and not P (even turns)."""
        return self.turn(name) % 2 == 1

    def in_step(self, names: Iterable[str]) -> bool:
        """Return whether all these matrices send the same factor at this call."""
        turns: dict[str, int] = self.state.get("turn", {})
        return len({turns.get(name, 0) % 2 for name in names}) == 1

    def advance(self, names: Iterable[str]) -> None:
        """Count a call for these matrices."""
        turns: dict[str, int] = self.state.setdefault("turn", {})
        turns.update({name: turns.get(name, 0) + 1 for name in names})

    def cache(self, key: str) -> dict[Any, Any]:
        """Return a dict for what kernels prepare once for each memory layout. It is never saved."""
        cache: dict[Any, Any] = self.state.setdefault(f"_{key}", {})
        return cache


def _check_types(rank: object, min_compression: object, warm_start: object, seed: object) -> None:
    for argument, value in (("rank", rank), ("seed", seed)):
        if not is_whole(value, least=None):
            raise ValueError(
                f"LowRank({argument}={value!r}): {argument} must be a whole number, such as LowRank(rank=4)."
            )
    if not is_number(min_compression):
        raise ValueError(
            f"LowRank(min_compression={min_compression!r}): min_compression must be a finite number, "
            "such as LowRank(rank=4)."
        )
    if not isinstance(warm_start, bool):
        raise ValueError(f"LowRank(warm_start={warm_start!r}): warm_start must be True or False.")


_Pairs: TypeAlias = dict[str, tuple[Tensor, Tensor]]
_Rounds: TypeAlias = Exchange[tuple[_Pairs, Callable[[], _Pairs], Tensor]]


def _matrix(codec: LowRank, name: str, t: Tensor) -> Tensor:
    if t.dim() < 2 or t.numel() == 0:
        raise ValueError(
            f"{codec} was given {name!r} of shape {list(t.shape)}: it accepts only matrices. "
            f"Wrap it in ByShape({codec}), which sends everything else exactly."
        )
    return t.reshape(t.shape[0], -1).to(wide_dtype(t.dtype))


def _pairs(p: dict[str, Tensor], q: dict[str, Tensor]) -> _Pairs:
    return {name: (p[name], q[name]) for name in p}


def _products(pairs: _Pairs, like: Tensors) -> dict[str, Tensor]:
    """Return P Qᵀ of each matrix, in the tensor's own shape and dtype."""
    return {name: narrowed((pairs[name][0] @ pairs[name][1].T).view(t.shape), t.dtype) for name, t in like.items()}


def _usable(new: dict[str, Tensor], old: Mapping[str, Tensor], ok: Tensor) -> dict[str, Tensor]:
    """Choose the factors to keep: the new one, or the old one where the new one is zero (no gradient) or non-finite."""
    return {name: keep_if(ok & (x != 0).any(), x.clone(), old[name]) for name, x in new.items()}
