"""`ErrorFeedback(LowRank)` with in-place matrix products: on the CPU, and on CUDA without Triton.

M = G + E (gradient plus residual) is computed in the memory of the gradients. When the exchanges of the step are known
to be finite, the new residual is written over E, and the mean over M, so no temporary is as large as the gradients.
Results do not depend on where a matrix lies in memory, or beside which others: a resumed run repeats the bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laconic.exchange import Averaged, Decide, Exchange, Peers, Tensors
from laconic.kernels.orthonormal import orthonormal_all
from laconic.packing import aligned, is_aligned

if TYPE_CHECKING:
    from laconic.codecs.low_rank import Factors, LowRank

_BLOCK = 1 << 20
"""Numbers in a block of rows: 4 MB of fp32. Smaller ones cost more in calls and in threads that wait than they save."""


def dense_feedback(
    codec: LowRank, tensors: Tensors, residual: dict[str, Tensor], factors: Factors, peers: Peers
) -> Exchange[Averaged]:
    """Average `tensors` in place through `codec` with error feedback, and update the residuals in place."""
    old = {name: residual[name] if name in residual else torch.zeros_like(t) for name, t in tensors.items()}
    e = {name: _matrix(x) for name, x in old.items()}
    m = {name: _matrix(t) for name, t in tensors.items()}
    if codec.rounds == "two":
        own_p = _products(m, _known(m, factors.q, codec, factors), of_q=False, add=e)
        fixed = orthonormal_all((yield from codec.reduce(own_p, factors, peers)).mean)
        sends_q, own = True, _products(m, fixed, of_q=True)
    else:
        sends_q = factors.sends_q(next(iter(tensors)))
        fixed = _known(m, factors.p if sends_q else factors.q, codec, factors)
        own = _products(m, fixed, of_q=sends_q, add=e)
    reduced = yield from codec.reduce(own, factors, peers)
    mean = reduced.mean

    ok = yield Decide(reduced.finite())
    keep = bool(ok)
    own = reduced.own() if keep else {}
    for name, whole in m.items():
        p, q = (fixed[name], mean[name]) if sends_q else (mean[name].contiguous(), fixed[name])
        sent_p, sent_q = (p, own.get(name, q)) if sends_q else (own.get(name, p), q)
        thin, sent_thin = q.T.contiguous(), sent_q.T.contiguous()  # [rank, columns]
        for x, kept, p_here, sent_here in zip(*(_blocks(t, whole) for t in (whole, e[name], p, sent_p)), strict=True):
            if keep:
                _low_rank(sent_here, sent_thin, kept, taken_from=x)
            _low_rank(p_here, thin, x)
    if keep:
        residual.update(old)
        _keep(mean, factors.q if sends_q else factors.p)
        (factors.p if sends_q else factors.q).update(fixed)
        factors.advance(tensors)
    return Averaged(dict(tensors), lambda: dict(tensors), lambda: ok, decided=True)


def _matrix(t: Tensor) -> Tensor:
    return t if t.dim() == 2 else t.view(t.shape[0], -1)  # [rows, columns]


def _blocks(t: Tensor, matrix: Tensor) -> Sequence[Tensor]:
    """Return the rows of `t` in blocks, such that those of `matrix` stay in the cache between two operations.

    They are multiples of 16 rows: if the matrix starts at a cache line, so do all of them.
    """
    rows, columns = matrix.shape
    step = rows if matrix.device.type == "cuda" else max(16, _BLOCK // columns // 16 * 16)
    return [t] if rows <= step else t.split(step)


def _known(m: Mapping[str, Tensor], known: Mapping[str, Tensor], codec: LowRank, factors: Factors) -> dict[str, Tensor]:
    """Return the orthonormal factors that all workers hold already, [columns or rows, rank]."""
    found = {n: known[n] if n in known else codec.first_q(n, x.shape, factors, x) for n, x in m.items()}
    return orthonormal_all(found)


def _products(
    m: Mapping[str, Tensor], factors: Mapping[str, Tensor], of_q: bool, add: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return Q = Mᵀ P, [columns, rank], or P = M Q, [rows, rank]. With `add`, first compute M in the memory of G."""
    products = {}
    for name, whole in m.items():
        thin = factors[name].T.contiguous()  # [rank, rows or columns], the layout in which products are quick
        parts = _blocks(thin.T, whole) if of_q else []
        residuals = [] if add is None else _blocks(add[name], whole)
        made: list[Tensor] = []
        for index, x in enumerate(_blocks(whole, whole)):
            if residuals:
                x.add_(residuals[index])
            if not of_q:
                made.append(torch.mm(aligned(x), thin.T))
            elif made:
                made[0].addmm_(parts[index].T, x)
            else:
                made.append(torch.mm(parts[index].T, x))
        products[name] = made[0].T if of_q else made[0] if len(made) == 1 else torch.cat(made)
    return products


def _low_rank(p: Tensor, thin: Tensor, into: Tensor, taken_from: Tensor | None = None) -> None:
    """Write the product of P [rows, rank] and Qᵀ [rank, columns], or a matrix minus it, to a block of rows."""
    out = into if is_aligned(into) else torch.empty_like(into)
    if taken_from is None:
        torch.mm(p, thin, out=out)
    else:
        torch.addmm(taken_from, p, thin, alpha=-1, out=out)
    if out is not into:
        into.copy_(out)


def _keep(mean: Mapping[str, Tensor], known: dict[str, Tensor]) -> None:
    """Store factors for the next call; a zero factor, of a matrix without gradient, does not replace an older one."""
    for name, x in mean.items():
        if name not in known or bool(x.any()):
            known[name] = x
