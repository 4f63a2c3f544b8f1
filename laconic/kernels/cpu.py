"""`ErrorFeedback(LowRank)` with in-place matrix products: on the CPU, and on CUDA without Triton.

M = G + E (gradient plus residual) is computed in the memory of the gradients. When the exchanges of the step are known
to be finite, the new residual is written over E, and the mean over M, so no temporary is as large as the gradients.
What is computed does not depend on where gradients and residuals lie in memory: a resumed run repeats the bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laconic.codecs.orthonormal import orthonormal
from laconic.codecs.packing import aligned
from laconic.comm.requests import Averaged, Decide, Exchange, Mean, Tensors, all_finite
from laconic.kernels.choose import own_is_in_residual

if TYPE_CHECKING:
    from laconic.codecs.low_rank import LowRank
    from laconic.codecs.low_rank_state import Factors


@dataclass(frozen=True, eq=False)
class SameShape:
    """Matrices of one shape: [1, rows, columns] views of gradients and residuals. Factors are [matrices, ..., rank]."""

    names: list[str]
    m: list[Tensor]
    e: list[Tensor]
    rank: int

    def factor_shape(self, of_q: bool) -> tuple[int, int, int]:
        """Return the shape of the factors Q, [matrices, columns, rank], or P, [matrices, rows, rank]."""
        _, rows, columns = self.m[0].shape
        return len(self.m), columns if of_q else rows, self.rank


def dense_feedback(codec: LowRank, tensors: Tensors, residual: dict[str, Tensor], factors: Factors) -> Exchange:
    """Average `tensors` in place through `codec` with error feedback, and update the residuals in place."""
    groups = _by_shape(codec, tensors, residual)
    if codec.rounds == "two":
        known = factors.q
        q = [_known(g, known, codec, factors) for g in groups]
        p_message = yield Mean(_products(groups, q, of_q=False, add=True))
        fixed = [orthonormal(x) for x in _split(p_message, groups, of_q=False)]
        sends_q, message = True, _products(groups, fixed, of_q=True)
    else:
        sends_q = factors.sends_q(next(iter(tensors)))
        known = factors.p if sends_q else factors.q
        fixed = [_known(g, known, codec, factors) for g in groups]
        message = _products(groups, fixed, sends_q, add=True)
    own = _split(message.clone(), groups, sends_q)
    received = yield Mean(message)
    mean = _split(received, groups, sends_q)

    ok = yield Decide(all_finite({"": received}))
    keep = bool(ok)
    for g, x, mine, base in zip(groups, mean, own, fixed, strict=True):
        for m, e, thin, new, old in zip(g.m, g.e, base.split(1), x.split(1), mine.split(1), strict=True):
            if keep:
                left, right = (thin, old) if sends_q else (old, thin)
                torch.baddbmm(m, left, right.mT, alpha=-1, out=e)
            left, right = (thin, new) if sends_q else (new, thin)
            torch.bmm(left, right.mT, out=m)
        if keep:
            _keep(g, x, factors.q if sends_q else factors.p)
            _keep(g, base, factors.p if sends_q else factors.q, even_zero=True)
    if keep:
        for name, e in ((name, e) for g in groups for name, e in zip(g.names, g.e, strict=True)):
            residual.setdefault(name, e.view(tensors[name].shape))
        factors.advance(tensors)
    return Averaged(dict(tensors), own_is_in_residual, lambda: ok, decided=True)


def _by_shape(codec: LowRank, tensors: Tensors, residual: dict[str, Tensor]) -> list[SameShape]:
    by_shape: dict[tuple[int, int], list[str]] = {}
    for name, t in tensors.items():
        by_shape.setdefault((t.shape[0], t.shape[1:].numel()), []).append(name)
    groups = []
    for shape, names in by_shape.items():
        m = [tensors[name].view(1, *shape) for name in names]
        old = [residual[n] if n in residual else torch.zeros_like(tensors[n]) for n in names]
        e = [each.view(1, *shape) for each in old]
        groups.append(SameShape(names, m, e, min(codec.rank, *shape)))
    return groups


def _known(g: SameShape, known: dict[str, Tensor], codec: LowRank, factors: Factors) -> Tensor:
    """Return the orthonormal factors that all workers hold already, [matrices, columns or rows, rank]."""
    some, shape = g.m[0], g.m[0].shape[1:]
    return orthonormal(
        torch.stack([known[n] if n in known else codec.first_q(n, shape, factors, some) for n in g.names])
    )


def _products(groups: list[SameShape], factors: list[Tensor], of_q: bool, add: bool = False) -> Tensor:
    """Return one message with P = M Q, or Q = Mᵀ P, of all matrices. With `add`, first compute M in the memory of G."""
    message = groups[0].m[0].new_empty(sum(prod(g.factor_shape(of_q)) for g in groups))
    for g, factor, product in zip(groups, factors, _split(message, groups, of_q), strict=True):
        for m, e, thin, into in zip(g.m, g.e, factor.split(1), product.split(1), strict=True):
            if add:
                m.add_(e)  # here, so that M is still in the cache for the product
            torch.bmm(m.mT if of_q else aligned(m), thin, out=into)
    return message


def _split(message: Tensor, groups: list[SameShape], of_q: bool) -> list[Tensor]:
    shapes = [g.factor_shape(of_q) for g in groups]
    pieces = message.split([prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _keep(g: SameShape, x: Tensor, known: dict[str, Tensor], even_zero: bool = False) -> None:
    """Store factors for the next call; a zero factor, of a matrix without gradient, does not replace an older one."""
    used = [True] * len(g.names) if even_zero else (x != 0).flatten(1).any(1).tolist()
    for name, factor, is_used in zip(g.names, x, used, strict=True):
        if is_used or name not in known:
            known[name] = factor.clone()
