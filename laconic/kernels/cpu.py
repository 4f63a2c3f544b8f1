"""`ErrorFeedback(LowRank)` with plain matrix products, in place: on the CPU, and on CUDA where there is no Triton.

M = G + E is formed in the gradients' own memory; matrices of one shape that lie at even distances, as those of a
model's layers do, are multiplied in one batched call; what is delivered is written over M, and what is owed over E. No
temporary is as large as the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laconic.codecs.orthonormal import orthonormal
from laconic.comm.requests import Averaged, Exchange, Mean, State, Tensors
from laconic.kernels.choose import own_is_owed

if TYPE_CHECKING:
    from laconic.codecs.low_rank import LowRank


@dataclass(frozen=True, eq=False)
class Batch:
    """Matrices of one shape, as one [batch, rows, columns] view each of gradients and residuals."""

    names: list[str]
    m: Tensor
    e: Tensor
    rank: int


def dense_feedback(codec: LowRank, tensors: Tensors, residual: dict[str, Tensor], state: State) -> Exchange:
    """Average `tensors` in place through `codec` with error feedback; the residual is what this worker still owes."""
    _fill(tensors, residual)
    batches = _batches(codec, tensors, residual)
    turns: dict[str, int] = state.setdefault("turn", {})
    odd = codec.rounds == "alternating" and turns.get(next(iter(tensors)), 0) % 2 == 1
    known_p, known_q = state.setdefault("p", {}), state.setdefault("q", {})

    if codec.rounds == "two":
        q = [_stacked(b, known_q, codec, state) for b in batches]
        p = [orthonormal(x) for x in _cut((yield Mean(_products(batches, q, False, add=True))), batches, False)]
        message = _products(batches, p, True)
        own = _cut(message.clone(), batches, True)
        heard = _cut((yield Mean(message)), batches, True)
        basis, odd = p, True
    else:
        basis = [_stacked(b, known_p if odd else known_q, codec, state) for b in batches]
        message = _products(batches, basis, odd, add=True)
        own = _cut(message.clone(), batches, odd)
        heard = _cut((yield Mean(message)), batches, odd)

    ok = torch.stack([x.sum() for x in heard]).isfinite().all()
    for b, x, mine, base in zip(batches, heard, own, basis, strict=True):
        left, right = (base, mine) if odd else (mine, base)
        if bool(ok):
            torch.baddbmm(b.m, left, right.mT, alpha=-1, out=b.e)
        left, right = (base, x) if odd else (x, base)
        torch.bmm(left, right.mT, out=b.m)
        if bool(ok):
            _remember(b, x, known_q if odd else known_p)
            _remember(b, base, known_p if odd else known_q, even_zero=True)
    if bool(ok):
        turns.update({name: turns.get(name, 0) + 1 for name in tensors})
    return Averaged(dict(tensors), own_is_owed, lambda: ok)


def _fill(tensors: Tensors, residual: dict[str, Tensor]) -> None:
    """Give what has no residual yet one of zeros, all in one piece, so that layers lie at even distances."""
    missing = {name: t for name, t in tensors.items() if name not in residual}
    if missing:
        some = next(iter(missing.values()))
        flat = torch.zeros(sum(t.numel() for t in missing.values()), dtype=some.dtype, device=some.device)
        for (name, t), piece in zip(missing.items(), flat.split([t.numel() for t in missing.values()]), strict=True):
            residual[name] = piece.view(t.shape)


def _batches(codec: LowRank, tensors: Tensors, residual: dict[str, Tensor]) -> list[Batch]:
    by_shape: dict[tuple[int, int], list[str]] = {}
    for name, t in tensors.items():
        by_shape.setdefault((t.shape[0], t.shape[1:].numel()), []).append(name)
    batches = []
    for shape, names in by_shape.items():
        m = _evenly([tensors[name] for name in names], shape)
        e = _evenly([residual[name] for name in names], shape)
        rank = min(codec.rank, *shape)
        # At rank 1 a batch may round otherwise than its members, and a resumed run must repeat the bits.
        if rank > 1 and m is not None and e is not None:
            batches.append(Batch(names, m, e, rank))
        else:
            batches += [Batch([n], tensors[n].view(1, *shape), residual[n].view(1, *shape), rank) for n in names]
    return batches


def _evenly(values: list[Tensor], shape: tuple[int, int]) -> Tensor | None:
    """One [batch, rows, columns] view of tensors at even distances in one storage, or None."""
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


def _stacked(b: Batch, known: dict[str, Tensor], codec: LowRank, state: State) -> Tensor:
    """The orthonormal factors to multiply with: [batch, columns or rows, rank]."""
    shape = torch.Size(b.m.shape[1:])
    return orthonormal(torch.stack([known[n] if n in known else codec.start(n, shape, state, b.m) for n in b.names]))


def _products(batches: list[Batch], factors: list[Tensor], transposed: bool, add: bool = False) -> Tensor:
    """M Q, or Mᵀ P, of all batches, straight into one message; with `add`, M is first made in the place of G."""
    side = 2 if transposed else 1
    sizes = [b.m.shape[0] * b.m.shape[side] * b.rank for b in batches]
    message = batches[0].m.new_empty(sum(sizes))
    for b, factor, piece in zip(batches, factors, message.split(sizes), strict=True):
        if add:
            b.m.add_(b.e)  # here, so that it is still in the cache for the product
        torch.bmm(b.m.mT if transposed else b.m, factor, out=piece.view(b.m.shape[0], b.m.shape[side], b.rank))
    return message


def _cut(message: Tensor, batches: list[Batch], transposed: bool) -> list[Tensor]:
    side = 2 if transposed else 1
    sizes = [b.m.shape[0] * b.m.shape[side] * b.rank for b in batches]
    pieces = message.split(sizes)
    return [x.view(b.m.shape[0], b.m.shape[side], b.rank) for b, x in zip(batches, pieces, strict=True)]


def _remember(b: Batch, x: Tensor, known: dict[str, Tensor], even_zero: bool = False) -> None:
    """Keep factors for the next turn; one of zeros, of a matrix without gradient, teaches nothing."""
    worth = [True] * len(b.names) if even_zero else (x != 0).flatten(1).any(1).tolist()
    for name, factor, used in zip(b.names, x, worth, strict=True):
        if used or name not in known:
            known[name] = factor.clone()
