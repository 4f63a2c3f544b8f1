"""`ErrorFeedback(LowRank)` with in-place matrix products: on the CPU, and on CUDA without Triton.

M = G + E (gradient plus residual) is computed in the memory of the gradients. When the exchanges of the step are known
to be finite, the new residual is written over E, and the mean over M, so no temporary is as large as the gradients.
Results do not depend on where a matrix lies in memory, or beside which others: a resumed run repeats the bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laconic.codecs.orthonormal import orthonormal_all
from laconic.codecs.packing import aligned
from laconic.comm.requests import Averaged, Decide, Exchange, Tensors, all_finite
from laconic.kernels.choose import own_is_in_residual

if TYPE_CHECKING:
    from laconic.codecs.low_rank import LowRank
    from laconic.codecs.low_rank_state import Factors


def dense_feedback(codec: LowRank, tensors: Tensors, residual: dict[str, Tensor], factors: Factors) -> Exchange:
    """Average `tensors` in place through `codec` with error feedback, and update the residuals in place."""
    old = {name: residual[name] if name in residual else torch.zeros_like(t) for name, t in tensors.items()}
    e = {name: _matrix(x) for name, x in old.items()}
    m = {name: _matrix(t) for name, t in tensors.items()}
    if codec.rounds == "two":
        own_p = _products(m, _known(m, factors.q, codec, factors), of_q=False, add=e)
        fixed = orthonormal_all((yield from codec.reduce(own_p, factors)).mean)
        sends_q, own = True, _products(m, fixed, of_q=True)
    else:
        sends_q = factors.sends_q(next(iter(tensors)))
        fixed = _known(m, factors.p if sends_q else factors.q, codec, factors)
        own = _products(m, fixed, of_q=sends_q, add=e)
    reduced = yield from codec.reduce(own, factors)
    mean = reduced.mean

    ok = yield Decide(all_finite(mean))
    keep = bool(ok)
    own = reduced.own() if keep else {}
    for name in tensors:
        if keep:
            p, q = (fixed[name], own[name]) if sends_q else (own[name], fixed[name])
            torch.baddbmm(m[name], p[None], q.T[None], alpha=-1, out=e[name])
        p, q = (fixed[name], mean[name]) if sends_q else (mean[name], fixed[name])
        torch.bmm(p[None], q.T[None], out=m[name])
    if keep:
        residual.update(old)
        _keep(mean, factors.q if sends_q else factors.p)
        (factors.p if sends_q else factors.q).update({name: x.clone() for name, x in fixed.items()})
        factors.advance(tensors)
    return Averaged(dict(tensors), own_is_in_residual, lambda: ok, decided=True)


def _matrix(t: Tensor) -> Tensor:
    return t.view(1, t.shape[0], -1)  # [1, rows, columns]


def _known(m: Mapping[str, Tensor], known: Mapping[str, Tensor], codec: LowRank, factors: Factors) -> dict[str, Tensor]:
    """Return the orthonormal factors that all workers hold already, [columns or rows, rank]."""
    found = {n: known[n] if n in known else codec.first_q(n, x.shape[1:], factors, x) for n, x in m.items()}
    return orthonormal_all(found)


def _products(
    m: Mapping[str, Tensor], factors: Mapping[str, Tensor], of_q: bool, add: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return Q = Mᵀ P, [columns, rank], or P = M Q, [rows, rank]. With `add`, first compute M in the memory of G."""
    products = {}
    for name, x in m.items():
        if add is not None:
            x.add_(add[name])  # here, so that M is still in the cache for the product
        products[name] = torch.bmm(x.mT if of_q else aligned(x), factors[name][None])[0]
    return products


def _keep(mean: Mapping[str, Tensor], known: dict[str, Tensor]) -> None:
    """Store factors for the next call; a zero factor, of a matrix without gradient, does not replace an older one."""
    for name, x in mean.items():
        if name not in known or bool(x.any()):
            known[name] = x.clone()
