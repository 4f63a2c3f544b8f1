"""Error feedback: what one round loses is added to the next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Literal, TypeVar

import torch
from torch import Tensor

from laconic.codecs.contract import Codec, check_codec, keep_if
from laconic.codecs.low_rank import Factors, LowRank
from laconic.codecs.quantized import Quantized
from laconic.codecs.shards import reduce_messages
from laconic.exchange import Averaged, Decide, Exchange, Peers, State, Tensors, all_finite
from laconic.kernels.choose import has_feedback_kernels, has_matrix_kernels
from laconic.kernels.cpu import dense_feedback
from laconic.packing import KeptRows, Shards, known_shards, narrowed, side_by_side, wide_dtype
from laconic.torch_private.foreach import copy_all, multiply_all
from laconic.values import as_code, is_number

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class ErrorFeedback:
    """Adds the residual of the last round to what this round sends.

    The residual is the input minus what this worker's *own* messages amount to (Vogels et al. 2019, arXiv:1905.13727,
    Algorithm 2), so it is bounded. `subtract="mean"` subtracts the mean over all workers instead, as torch's hook does:
    then the residual also accumulates this worker's distance from the mean, without bound.
    Residuals are fp32 whatever the gradient's dtype. What the mean loses when it is rounded to fp16 or bf16 and cut to
    their range goes into the residual of every worker: what is delivered plus the residual is the truth.
    With `decay` below 1, the residual is multiplied by it before each round, as in SparseLoCo (arXiv:2508.15706): what
    is too old to be of use is forgotten.

    Until all exchanges of a step have ended, each holds the sums of its gradients and residuals in fp32, and the result
    of the codec inside. The fused paths (`laconic.kernels`) hold thin factors only, and few bits on a CPU the means.
    """

    codec: Codec
    subtract: Literal["own", "mean"] = "own"
    decay: float = 1.0

    __repr__ = as_code

    def __post_init__(self) -> None:
        check_codec(f"ErrorFeedback({self.codec!r})", self.codec)
        if has_feedback(self.codec):
            raise ValueError(
                f"ErrorFeedback({self.codec!r}): the codec contains an ErrorFeedback already, and two residuals of one "
                "tensor grow without bound. Remove one of the two."
            )
        if self.subtract not in ("own", "mean"):
            raise ValueError(
                f'ErrorFeedback(subtract={self.subtract!r}): it must be "own" (the paper\'s rule) or "mean" (torch\'s).'
            )
        if not is_number(self.decay) or not 0 < self.decay <= 1:
            raise ValueError(f"ErrorFeedback(decay={self.decay!r}): decay must be above 0 and at most 1.")

    def accepts(self, shape: torch.Size) -> bool:
        """Accept what the codec inside accepts."""
        return self.codec.accepts(shape)

    @cached_property
    def is_plain(self) -> bool:
        """Whether it follows the paper's rule, which the fused paths compute."""
        return self.subtract == "own" and self.decay == 1

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        """Average `tensors` plus their residuals, and keep the new residuals."""
        residual: dict[str, Tensor] = state.setdefault("residual", {})
        inner: State = state.setdefault("inner", {})
        fused = self._fused(tensors, residual, inner, peers) if reuse and tensors and self.is_plain else None
        if fused is not None:
            return (yield from fused)
        # 1. what is to be sent, in fp32, and its average
        inputs = {name: _with_residual(t, residual.get(name), self.decay) for name, t in tensors.items()}
        end = yield from self.codec.average(inputs, inner, peers)
        # 2. may this step change the residuals?
        ok = end.finite() if end.decided else (yield Decide(end.finite()))
        # 3. the mean in the dtype of the gradient, and what that rounding loses
        mean = {name: narrowed(end.mean[name], t.dtype) for name, t in tensors.items()}
        lost = {name: x - mean[name].to(x.dtype) for name, x in end.mean.items() if x.dtype != mean[name].dtype}

        def own() -> dict[str, Tensor]:  # so that it averages to the mean that is delivered
            return {name: x - lost[name] if name in lost else x for name, x in end.own().items()}

        # 4. what was not delivered is the new residual
        sent = own() if self.subtract == "own" else mean
        for name, x in inputs.items():
            old = residual.get(name)
            if old is None:
                old = torch.zeros_like(x)
            residual[name] = keep_if(ok, x - sent[name], old)
        return Averaged(mean, own, lambda: ok, decided=True)

    def _fused(
        self, tensors: Tensors, residual: dict[str, Tensor], inner: State, peers: Peers
    ) -> Exchange[Averaged] | None:
        """Return an exchange that averages in the memory of the tensors, if there is one for this codec and device."""
        codec, some = self.codec, next(iter(tensors.values()))
        is_wide = some.dtype in (torch.float32, torch.float64)
        if isinstance(codec, LowRank) and codec.may_fuse(tensors, Factors(inner)):
            if some.is_cuda and has_matrix_kernels(tensors, codec.rank):
                from laconic.kernels.cuda.fused import fused_feedback  # needs Triton

                return fused_feedback(codec, tensors, residual, Factors(inner), peers)
            if is_wide and some.device.type != "meta":
                return dense_feedback(codec, tensors, residual, Factors(inner), peers)
        if not isinstance(codec, Quantized) or codec.rounding != "nearest" or peers.size == 1:
            return None
        if some.device.type == "cpu" and is_wide and all(map(Tensor.numel, tensors.values())):
            return rows_feedback(codec, tensors, residual, inner, peers)
        if not some.is_cuda or not has_feedback_kernels(tensors, residual, codec.block):
            return None
        from laconic.kernels.cuda.shards import quantized_feedback  # needs Triton

        return quantized_feedback(codec.bits, codec.block, tensors, residual, inner, peers)


def rows_feedback(
    codec: Quantized, tensors: Tensors, residual: dict[str, Tensor], inner: State, peers: Peers
) -> Exchange[Averaged]:
    """Average `tensors` in place in few bits with error feedback, all as rows of one tensor, and update the residuals.

    For tensors on the CPU of a wide dtype, none of them empty: there, a call for each tensor costs more than its work.
    """
    shards = known_shards(tensors, codec.row, peers.size, inner)
    kept = _residual_rows(tensors, residual, shards)
    # 1. what is to be sent, [n, row]: gradients plus residuals, in the memory of the gradients if these are rows
    flat = side_by_side(tensors.values()) if shards.counts is None else None
    rows = (shards.rows(tensors) if flat is None else flat.view(-1, codec.row)).add_(kept.rows)
    sent, decoded = codec.encode_and_decode(rows, shards.counts)
    # 2. what is not delivered takes its place; of the rows that this worker owns, that is known with the means
    mine = shards.owned(peers.rank).rows
    exact = rows.index_select(0, mine)
    rows.sub_(decoded)
    del decoded
    means, own_of_mine = yield from reduce_messages(sent, exact, shards, codec, peers)
    ok = yield Decide(all_finite({"": means}))
    # 3. the new residual
    if bool(ok):
        rows.index_copy_(0, mine, exact.sub_(own_of_mine()))
        if flat is None:
            shards.clear_padding(rows)
            kept = shards.kept = KeptRows(rows, shards.tensors(rows, tensors))
        else:
            kept.rows.copy_(rows)
        residual.update(kept.tensors)
    # 4. the mean
    if flat is None:
        copy_all(list(tensors.values()), list(shards.tensors(means, tensors).values()))
    else:
        rows.copy_(means)
    return Averaged(dict(tensors), lambda: dict(tensors), lambda: ok, decided=True)


def _residual_rows(tensors: Tensors, residual: dict[str, Tensor], shards: Shards) -> KeptRows:
    """Return the residuals as rows: those of which they are views already, or a copy."""
    kept, dtype = shards.kept, next(iter(tensors.values())).dtype
    if kept is None or kept.rows.dtype != dtype or any(residual.get(n) is not t for n, t in kept.tensors.items()):
        known = {name: residual[name] if name in residual else torch.zeros_like(t) for name, t in tensors.items()}
        rows = shards.rows(known).to(dtype)
        kept = shards.kept = KeptRows(rows, shards.tensors(rows, tensors))
    return kept


def return_to_residual(state: State, delivered: Mapping[str, Tensor], ok: Tensor | None = None) -> bool:
    """Add means that were delivered and then dropped to this worker's residuals, in place.

    All workers drop the same means, so nothing is lost: the next round sends them again. `state` is that of any codec,
    with `ErrorFeedback` anywhere inside. Tensors without a residual are left out: whether all have one is the result.
    If the 0-d bool `ok` is false, the step was void and no residual has changed: then nothing is returned either.
    """
    remaining = set(delivered)  # of several residuals of one name, one takes it
    for residual in _residuals(state):
        names = residual.keys() & remaining
        remaining -= names
        for name in names:
            old = residual[name]
            new = old + delivered[name].to(old.dtype)
            old.copy_(new if ok is None else torch.where(ok, new, old))
    return not remaining


def has_residuals(state: State) -> bool:
    """Return whether an `ErrorFeedback` keeps residuals in the state of a codec."""
    return any(_residuals(state))


def residuals_by_name(state: State) -> dict[str, Tensor]:
    """Return all residuals in the state of a codec by the name of their tensor; of several of one name, their sum."""
    found: dict[str, Tensor] = {}
    for residual in _residuals(state):
        for name, t in residual.copy().items():
            found[name] = found[name] + t if name in found else t
    return found


def rescale_residuals(state: State, factor: float | Tensor) -> None:
    """Multiply all residuals by `factor`, in place, as when the loss scale changes.

    `state` is that of any codec. `factor` may be a 0-d tensor: nothing waits for its value.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for residual in _residuals(state):
        for t in residual.values():
            by_device.setdefault(t.device, []).append(t)
    for device, tensors in by_device.items():
        multiply_all(tensors, factor.to(device) if isinstance(factor, Tensor) else factor)


def _residuals(tree: State) -> Iterator[dict[str, Tensor]]:
    """Find the residuals of every `ErrorFeedback` in a tree of codec state; keys with an underscore are caches.

    A fragment in flight may add a key meanwhile, in the queue's thread: dicts are copied before they are iterated.
    """
    for key, value in tree.copy().items():
        if key == "residual" and isinstance(value, dict):
            yield value
        elif isinstance(value, dict) and not key.startswith("_"):
            yield from _residuals(value)


def has_feedback(codec: object) -> bool:
    """Return whether a codec is an `ErrorFeedback`, or contains one."""
    return contains(codec, ErrorFeedback)


def contains(codec: object, kind: type) -> bool:
    """Return whether a codec is of this kind, or contains one that is."""
    return next(codecs_of(codec, kind), None) is not None


def codecs_of(codec: object, kind: type[T]) -> Iterator[T]:
    """Yield the codecs of this kind in a codec: itself, or what it wraps and routes to."""
    if isinstance(codec, kind):
        yield codec
    parts = [getattr(codec, f.name) for f in fields(codec)] if is_dataclass(codec) else []
    if isinstance(codec, Mapping):  # of `ByName`
        parts = list(codec.values())
    for part in parts:
        yield from codecs_of(part, kind)


def _with_residual(t: Tensor, residual: Tensor | None, decay: float) -> Tensor:
    wide = t.to(wide_dtype(t.dtype))
    return wide.clone() if residual is None else torch.add(wide, residual, alpha=decay)
