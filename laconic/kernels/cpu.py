"""`ErrorFeedback(LowRank)` with in-place matrix products: on the CPU, and on CUDA without Triton.

M = G + E (gradient plus residual) is computed in the memory of the gradients. The mean is then written over M, and the
new residual over E, so no temporary is as large as the gradients. Matrices of one shape at equal distances in memory,
such as those of a model's layers, are multiplied in one batched call.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laconic.codecs.orthonormal import orthonormal
from laconic.comm.requests import Averaged, Exchange, Mean, Tensors
from laconic.kernels.choose import own_is_in_residual

if TYPE_CHECKING:
    from laconic.codecs.low_rank import LowRank
    from laconic.codecs.low_rank_state import Factors


@dataclass(frozen=True, eq=False)
class MatrixBatch:
    """Matrices of one shape: [batch, rows, columns] views of gradients and residuals."""

    names: list[str]
    m: Tensor
    e: Tensor
    rank: int

    def factor_shape(self, of_q: bool) -> tuple[int, int, int]:
        """Return the shape of the batched factor Q, [batch, columns, rank], or P, [batch, rows, rank]."""
        batch, rows, columns = self.m.shape
        return batch, columns if of_q else rows, self.rank


def dense_feedback(codec: LowRank, tensors: Tensors, residual: dict[str, Tensor], factors: Factors) -> Exchange:
    """Average `tensors` in place through `codec` with error feedback, and update the residuals in place."""
    _add_missing(tensors, residual)
    batches = _batches(codec, tensors, residual)
    if codec.rounds == "two":
        known = factors.q
        q = [_known(b, known, codec, factors) for b in batches]
        p_message = yield Mean(_products(batches, q, of_q=False, add=True))
        fixed = [orthonormal(x) for x in _split(p_message, batches, of_q=False)]
        sends_q, message = True, _products(batches, fixed, of_q=True)
    else:
        sends_q = factors.sends_q(next(iter(tensors)))
        known = factors.p if sends_q else factors.q
        fixed = [_known(b, known, codec, factors) for b in batches]
        message = _products(batches, fixed, sends_q, add=True)
    own = _split(message.clone(), batches, sends_q)
    mean = _split((yield Mean(message)), batches, sends_q)

    ok = torch.stack([x.sum() for x in mean]).isfinite().all()
    known_sent, known_fixed = (factors.q, factors.p) if sends_q else (factors.p, factors.q)
    for b, x, mine, base in zip(batches, mean, own, fixed, strict=True):
        left, right = (base, mine) if sends_q else (mine, base)
        if bool(ok):
            torch.baddbmm(b.m, left, right.mT, alpha=-1, out=b.e)
        left, right = (base, x) if sends_q else (x, base)
        torch.bmm(left, right.mT, out=b.m)
        if bool(ok):
            _keep(b, x, known_sent)
            _keep(b, base, known_fixed, even_zero=True)
    if bool(ok):
        factors.advance(tensors)
    return Averaged(dict(tensors), own_is_in_residual, lambda: ok)


def _add_missing(tensors: Tensors, residual: dict[str, Tensor]) -> None:
    """Add zero residuals where there are none, in one flat tensor, so that equal layers are at equal distances."""
    missing = {name: t for name, t in tensors.items() if name not in residual}
    if missing:
        some = next(iter(missing.values()))
        flat = torch.zeros(sum(t.numel() for t in missing.values()), dtype=some.dtype, device=some.device)
        for (name, t), piece in zip(missing.items(), flat.split([t.numel() for t in missing.values()]), strict=True):
            residual[name] = piece.view(t.shape)


def _batches(codec: LowRank, tensors: Tensors, residual: dict[str, Tensor]) -> list[MatrixBatch]:
    by_shape: dict[tuple[int, int], list[str]] = {}
    for name, t in tensors.items():
        by_shape.setdefault((t.shape[0], t.shape[1:].numel()), []).append(name)
    batches = []
    for shape, names in by_shape.items():
        m = _batched_view([tensors[name] for name in names], shape)
        e = _batched_view([residual[name] for name in names], shape)
        rank = min(codec.rank, *shape)
        # At rank 1 a batched product may round differently from single ones, and a resumed run must repeat the bits.
        if rank > 1 and m is not None and e is not None:
            batches.append(MatrixBatch(names, m, e, rank))
        else:
            batches += [MatrixBatch([n], tensors[n].view(1, *shape), residual[n].view(1, *shape), rank) for n in names]
    return batches


def _batched_view(values: list[Tensor], shape: tuple[int, int]) -> Tensor | None:
    """Return one [batch, rows, columns] view of tensors at equal distances in one storage, or None."""
    first = values[0]
    if len(values) == 1:
        return first.view(1, *shape)
    step = values[1].storage_offset() - first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    for place, t in enumerate(values):
        if t.storage_offset() != first.storage_offset() + place * step or t.untyped_storage().data_ptr() != storage:
            return None
    if step <= 0:
        return None
    return first.as_strided((len(values), *shape), (step, shape[1], 1), first.storage_offset())


def _known(b: MatrixBatch, known: dict[str, Tensor], codec: LowRank, factors: Factors) -> Tensor:
    """Return the orthonormal factors that all workers hold already, [batch, columns or rows, rank]."""
    shape = torch.Size(b.m.shape[1:])
    found = [known[n] if n in known else codec.first_q(n, shape, factors, b.m) for n in b.names]
    return orthonormal(torch.stack(found))


def _products(batches: list[MatrixBatch], factors: list[Tensor], of_q: bool, add: bool = False) -> Tensor:
    """Return one message with P = M Q, or Q = Mᵀ P, of all batches. With `add`, first compute M in the memory of G."""
    message = batches[0].m.new_empty(sum(prod(b.factor_shape(of_q)) for b in batches))
    for b, factor, product in zip(batches, factors, _split(message, batches, of_q), strict=True):
        if add:
            b.m.add_(b.e)  # here, so that M is still in the cache for the product
        torch.bmm(b.m.mT if of_q else b.m, factor, out=product)
    return message


def _split(message: Tensor, batches: list[MatrixBatch], of_q: bool) -> list[Tensor]:
    shapes = [b.factor_shape(of_q) for b in batches]
    pieces = message.split([prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _keep(b: MatrixBatch, x: Tensor, known: dict[str, Tensor], even_zero: bool = False) -> None:
    """Store factors for the next call; a zero factor, of a matrix without gradient, does not replace an older one."""
    used = [True] * len(b.names) if even_zero else (x != 0).flatten(1).any(1).tolist()
    for name, factor, is_used in zip(b.names, x, used, strict=True):
        if is_used or name not in known:
            known[name] = factor.clone()
