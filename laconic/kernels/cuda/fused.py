"""`ErrorFeedback(LowRank)` on CUDA as an exchange, together with the tensors that `ByShape` sends in the same message.

What depends only on shapes and addresses is built once for each bucket (`matrices.py`) and cached in the state, under
keys that are never saved. The factors in the state are views of the bucket's flat factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laconic.exchange import Averaged, Decide, Exchange, Mean, Peers, Tensors
from laconic.kernels.cuda.launches import Sequence
from laconic.kernels.cuda.matrices import BucketMatrices

if TYPE_CHECKING:
    from laconic.codecs.low_rank import Factors, LowRank


@dataclass(frozen=True, eq=False)
class FusedBucket:
    """A bucket's kernels, with the tensors and residuals that they read and write."""

    bucket: BucketMatrices
    tensors: Tensors
    values: list[Tensor]
    residual: dict[str, Tensor]
    residuals: list[Tensor]
    factors: Factors

    def is_current(self, codec: LowRank, tensors: Tensors) -> bool:
        """Return whether codec, tensors and residuals are the same objects as before, so that all addresses hold."""
        return (
            self.bucket.codec == codec
            and all(map(is_, tensors.values(), self.values))
            and all(map(is_, map(self.residual.get, self.bucket.names), self.residuals))
        )

    def exchange(self, peers: Peers) -> Exchange[Averaged]:
        """Average the tensors and update the residuals, both in place."""
        bucket, mean = self.bucket, self.tensors
        if bucket.codec.rounds == "two":
            last = yield from _two_rounds(bucket, peers)
        else:
            last = yield from _one_round(bucket, self.factors, peers)
        ok = yield Decide(bucket.keep)
        if ok is not bucket.keep:
            bucket.keep.copy_(ok)
        bucket.run(last)
        if bucket.codec.rounds == "alternating":
            self.factors.advance(bucket.names)
        keep = bucket.keep
        means = mean if isinstance(mean, dict) else dict(mean)
        return Averaged(means, lambda: means, lambda: keep.bool(), decided=True)


def fused_feedback(
    codec: LowRank, tensors: Tensors, residual: dict[str, Tensor], factors: Factors, peers: Peers
) -> Exchange[Averaged]:
    """Average `tensors` in place through `codec` with error feedback, and update the residuals in place."""
    return bind(codec, tensors, {}, tensors, residual, factors).exchange(peers)


def bind(
    codec: LowRank, matrices: Tensors, rest: Tensors, whole: Tensors, residual: dict[str, Tensor], factors: Factors
) -> FusedBucket:
    """Bind a bucket, the cached one if it fits, to these tensors."""
    bucket = _bucket(codec, matrices, rest, residual, factors)
    bucket.set_addresses(matrices, residual, rest)
    return FusedBucket(bucket, whole, list(whole.values()), residual, [residual[name] for name in matrices], factors)


def _two_rounds(bucket: BucketMatrices, peers: Peers) -> Exchange[str]:
    """Run all phases but the last, and return its name: it changes residuals and factors, if the flag `keep` is set."""
    bucket.run("first p")
    yield from _average(bucket, "p", peers)
    bucket.run("between")
    yield from _average(bucket, "q", peers)
    bucket.run("check q")
    return "last q"


def _one_round(bucket: BucketMatrices, factors: Factors, peers: Peers) -> Exchange[str]:
    """The same with one message, of Q or of P."""
    side = "q" if factors.sends_q(bucket.names[0]) else "p"
    bucket.run(f"first {side}")
    yield from _average(bucket, side, peers)
    bucket.run(f"check {side}")
    return f"last {side}"


def _average(bucket: BucketMatrices, side: str, peers: Peers) -> Exchange[None]:
    """Average a message in its memory; in few bits, its own part becomes what the messages amount to."""
    message = bucket.p_message if side == "p" else bucket.q_message
    if bucket.codec.bits is None:
        _store(message, (yield Mean(message)))
        return
    if peers.size > 1:
        shards = bucket.shards(side, peers.rank, peers.size)
        messages = yield from shards.reduce()
        needs_own = side == "q" or bucket.codec.rounds == "alternating"
        shards.finish(messages, keep=bucket.never, own=needs_own)


def _store(message: Tensor, mean: Tensor) -> None:
    """Copy the mean to the memory that the kernels read; most collectives reduce in place, and no copy is needed."""
    if mean.data_ptr() != message.data_ptr():
        message.copy_(mean.view(-1))


def _bucket(
    codec: LowRank, matrices: Tensors, rest: Tensors, residual: dict[str, Tensor], factors: Factors
) -> BucketMatrices:
    """Return the cached bucket for these matrices, or a new one if it does not fit."""
    buckets: dict[tuple[str, ...], BucketMatrices] = factors.cache("fused")
    key = tuple(matrices)
    bucket = buckets.get(key)
    some = next(iter(matrices.values()))
    if (
        bucket is None
        or (bucket.codec, bucket.dtype, bucket.device) != (codec, some.dtype, some.device)
        or bucket.rest_names != list(rest)
        or not all(map(is_, map(factors.q.get, key), bucket.q_views))
        or not all(map(is_, map(factors.p.get, key), bucket.p_views))
    ):
        for other in [k for k in buckets if set(k) & set(key)]:
            del buckets[other]  # an older layout of the same matrices
        bucket = buckets[key] = BucketMatrices(codec, matrices, rest)
        _start(bucket, matrices, residual, factors)
    return bucket


def _start(bucket: BucketMatrices, matrices: Tensors, residual: dict[str, Tensor], factors: Factors) -> None:
    """Copy known factors, or random ones, into a new bucket, and add zero residuals where there are none."""
    known_p, known_q = factors.p, factors.q
    for (name, t), p, q in zip(matrices.items(), bucket.p_views, bucket.q_views, strict=True):
        if name not in residual:
            residual[name] = torch.zeros(t.shape, dtype=torch.float32, device=t.device)
        q.copy_(bucket.codec.first_q(name, t.shape, factors, t))
        if name in known_p:
            p.copy_(known_p[name])
    Sequence(bucket.orthonormal_q(bucket.q.clone(), bucket.q, bucket.always))()
    if all(name in known_p for name in bucket.names):
        Sequence(bucket.orthonormal_p(bucket.p.clone(), bucket.p, bucket.always))()
    bucket.new_p.copy_(bucket.p)
    known_p.update(zip(bucket.names, bucket.p_views, strict=True))
    known_q.update(zip(bucket.names, bucket.q_views, strict=True))
