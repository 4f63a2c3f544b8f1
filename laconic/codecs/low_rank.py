"""PowerSGD: a matrix travels as two thin factors (Vogels et al. 2019, arXiv:1905.13727).

`rounds="two"` is the paper's Algorithm 1: P, then Q, each averaged, every step. `rounds="alternating"` sends P on
even turns and Q on odd ones, half the bytes and one round, as in the authors' current code and in ACP-SGD
(Zhang et al. 2023, arXiv:2306.08881).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from laconic.codecs.contract import keep_if, wide_dtype
from laconic.codecs.orthonormal import orthonormal_all
from laconic.codecs.packing import pack, unpack
from laconic.comm.requests import Averaged, Exchange, Mean, Request, State, Tensors, all_finite
from laconic.values import as_code


@dataclass(frozen=True, repr=False)
class LowRank:
    """PowerSGD: each matrix travels as two thin factors.

    An [m, n] matrix costs rank * (m + n) numbers instead of m * n, or half of that with `rounds="alternating"`.
    A tensor of more dimensions is taken as [first, all others]. Biased, so wrap it in `ErrorFeedback`. Matrices
    that would not shrink more than `min_compression` times are declined. All arithmetic is in fp32.
    """

    rank: int
    min_compression: float = 2
    rounds: Literal["two", "alternating"] = "two"
    warm_start: bool = True
    seed: int = 0

    __repr__ = as_code

    def __post_init__(self) -> None:
        _check_kinds(self.rank, self.min_compression, self.warm_start, self.seed)
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
                'from the turn before, which is the warm start. Use rounds="two" to start afresh each turn.'
            )

    def accepts(self, shape: torch.Size) -> bool:
        """Accept matrices that shrink enough."""
        if len(shape) < 2 or shape.numel() == 0:
            return False
        rows, columns = shape[0], shape[1:].numel()
        rank = min(self.rank, rows, columns)
        return rank * (rows + columns) * self.min_compression < rows * columns

    def average(self, tensors: Tensors, state: State, *, reuse: bool = False) -> Exchange:
        """Average the matrices' low-rank parts."""
        matrices = {name: _matrix(self, name, t) for name, t in tensors.items()}  # [rows, columns] each
        if not matrices:
            return Averaged({}, dict, lambda: torch.tensor(True))
        if self.rounds == "two":
            mean, own, ok = yield from self._two_rounds(matrices, state)
        else:
            mean, own, ok = yield from self._one_factor(matrices, state)
        # An accelerator is not asked whether the turn was good: it would have to wait. The turn passes there.
        if ok.device.type != "cpu" or bool(ok):
            turns = state.setdefault("turn", {})
            turns.update({name: turns.get(name, 0) + 1 for name in matrices})
        return Averaged(_products(mean, tensors), lambda: _products(own, tensors), lambda: ok)

    def _two_rounds(self, matrices: dict[str, Tensor], state: State) -> _Turn:
        known = state.setdefault("q", {})
        before = {name: self.start(name, m.shape, state, m) for name, m in matrices.items()}
        q = orthonormal_all(before)
        own_p = {name: m @ q[name] for name, m in matrices.items()}  # [rows, rank]
        p = orthonormal_all(unpack((yield Mean(pack(own_p))), like=own_p))
        own_q = {name: m.T @ p[name] for name, m in matrices.items()}  # [columns, rank]
        q = unpack((yield Mean(pack(own_q))), like=own_q)
        ok = all_finite(q)
        if self.warm_start:
            known.update(_usable(q, before, ok))
            known_p = state.setdefault("p", {})
            known_p.update(_usable(p, {name: torch.zeros_like(x) for name, x in p.items()} | known_p, ok))
        return _pairs(p, q), _pairs(p, own_q), ok

    def _one_factor(self, matrices: dict[str, Tensor], state: State) -> _Turn:
        """Send P = M Q or Q = Mᵀ P, as each matrix's turn has it; the other factor is known to all."""
        turns = state.setdefault("turn", {})
        known_p, known_q = state.setdefault("p", {}), state.setdefault("q", {})
        even = {name: m for name, m in matrices.items() if turns.get(name, 0) % 2 == 0}
        odd = {name: m for name, m in matrices.items() if name not in even}
        q = orthonormal_all({name: self.start(name, m.shape, state, m) for name, m in even.items()})
        p = orthonormal_all({name: known_p[name] for name in odd})
        own_p = {name: m @ q[name] for name, m in even.items()}  # [rows, rank]
        own_q = {name: m.T @ p[name] for name, m in odd.items()}  # [columns, rank]
        heard = unpack((yield Mean(pack(own_p | own_q))), like=own_p | own_q)
        ok = all_finite(heard)
        mean_p = {name: heard[name] for name in even}
        mean_q = {name: heard[name] for name in odd}
        zeros = {name: torch.zeros_like(x) for name, x in mean_p.items() if name not in known_p}
        known_p.update(_usable(mean_p, known_p | zeros, ok))
        known_q.update(_usable(mean_q, known_q, ok))
        known_q.update({name: x for name, x in q.items() if name not in known_q})
        return _pairs(mean_p | p, q | mean_q), _pairs(own_p | p, q | own_q), ok

    def start(self, name: str, shape: torch.Size, state: State, like: Tensor) -> Tensor:
        """Return the factor Q to begin with, [columns, rank]: the last one, or random, the same on every worker."""
        known: dict[str, Tensor] = state["q"]
        if self.warm_start and name in known:
            return known[name]
        turn = 0 if self.warm_start else state.get("turn", {}).get(name, 0)
        digest = hashlib.sha256(f"{self.seed}/{name}/{turn}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
        rows, columns = shape[0], shape[1:].numel()
        dtype = wide_dtype(like.dtype)
        return torch.randn(columns, min(self.rank, rows, columns), generator=generator, dtype=dtype).to(like.device)


def _check_kinds(rank: object, min_compression: object, warm_start: object, seed: object) -> None:
    for word, value, whole in (("rank", rank, True), ("seed", seed, True), ("min_compression", min_compression, False)):
        number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not number or (isinstance(value, float) and not math.isfinite(value)):
            kind = "a whole number" if whole else "a finite number"
            raise ValueError(f"LowRank({word}={value!r}): {word} must be {kind}, such as LowRank(rank=4).")
    if not isinstance(warm_start, bool):
        raise ValueError(f"LowRank(warm_start={warm_start!r}): warm_start must be True or False.")


_Pairs: TypeAlias = dict[str, tuple[Tensor, Tensor]]
_Turn: TypeAlias = Generator[Request, Tensor, tuple[_Pairs, _Pairs, Tensor]]


def _matrix(codec: LowRank, name: str, t: Tensor) -> Tensor:
    if t.dim() < 2 or t.numel() == 0:
        raise ValueError(
            f"{codec} was given {name!r} of shape {list(t.shape)}: it carries matrices. "
            f"Wrap it in ByShape({codec}), which sends everything else exactly."
        )
    return t.reshape(t.shape[0], -1).to(wide_dtype(t.dtype))


def _pairs(p: dict[str, Tensor], q: dict[str, Tensor]) -> _Pairs:
    return {name: (p[name], q[name]) for name in p}


def _products(pairs: _Pairs, like: Tensors) -> dict[str, Tensor]:
    """Multiply out: P Qᵀ for each matrix, in the tensor's own shape and dtype."""
    return {name: (pairs[name][0] @ pairs[name][1].T).view(t.shape).to(t.dtype) for name, t in like.items()}


def _usable(new: dict[str, Tensor], old: Mapping[str, Tensor], ok: Tensor) -> dict[str, Tensor]:
    """Choose what to start from next time: a factor that is zero (no gradient) or not finite teaches nothing."""
    return {name: keep_if(ok & (x != 0).any(), x.clone(), old[name]) for name, x in new.items()}
