"""Several codecs for the tensors of one bucket, in the same rounds: chosen by shape (`ByShape`) or name (`ByName`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from laconic.codecs.contract import Codec, accept_every_shape, check_codec, check_rest
from laconic.codecs.exact import Exact
from laconic.codecs.feedback import ErrorFeedback
from laconic.codecs.low_rank import Factors, LowRank
from laconic.exchange import (
    AllToAll,
    Averaged,
    Decide,
    Done,
    Exchange,
    Gather,
    Mean,
    Peers,
    Request,
    State,
    Tensors,
    advance,
    all_true,
    true,
)
from laconic.kernels.choose import MAX_COPIED, has_matrix_kernels
from laconic.packing import on_cuda
from laconic.values import as_code

Part: TypeAlias = tuple[str, Codec, dict[str, Tensor]]
"""The key of a codec's state, the codec, and its tensors."""


@dataclass(frozen=True, repr=False)
class ByShape:
    """Sends matrices through one codec, and the vectors and small tensors that it declines through `rest`.

    `rest` is exact by default. Both codecs run in the same rounds: means of one dtype that they request in one round
    are sent as one message.
    """

    codec: Codec
    rest: Codec = field(default_factory=Exact)

    __repr__ = as_code
    accepts = accept_every_shape

    def __post_init__(self) -> None:
        check_codec(f"ByShape({self.codec!r}, rest={self.rest!r})", self.codec)
        check_codec(f"ByShape({self.codec!r}, rest={self.rest!r})", self.rest)
        check_rest("ByShape", self.rest)

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        """Average each tensor through the codec for its shape."""
        fused = self._fused(tensors, state, peers) if reuse and on_cuda(tensors) else None
        if fused is not None:
            return (yield from fused)
        return (yield from average_parts(tensors, self.parts(tensors), state, peers, reuse=reuse))

    def _fused(self, tensors: Tensors, state: State, peers: Peers) -> Exchange[Averaged] | None:
        """Return one exchange with one message for both codecs, where kernels for that exist."""
        feedback = self.codec
        if not isinstance(feedback, ErrorFeedback) or not feedback.is_plain or self.rest != Exact():
            return None
        codec = feedback.codec
        if not isinstance(codec, LowRank) or codec.bits or any(t.dtype != torch.float32 for t in tensors.values()):
            return None
        kept: State = state.setdefault("codec", {})
        residual, factors = kept.setdefault("residual", {}), Factors(kept.setdefault("inner", {}))
        bound_before = factors.cache("bound")
        known = bound_before.get(id(tensors))
        if known is not None and known.is_current(codec, tensors):
            exchange: Exchange[Averaged] = known.exchange(peers)
            return exchange
        (_, _, matrices), (_, _, rest) = self.parts(tensors)
        if not matrices or not codec.may_fuse(matrices, factors) or not has_matrix_kernels(matrices, codec.rank):
            return None
        if sum(t.numel() for t in rest.values()) > MAX_COPIED or not all(t.is_contiguous() for t in rest.values()):
            return None
        from laconic.kernels.cuda.fused import bind  # needs Triton

        bound = bind(codec, matrices, rest, tensors, residual, factors)
        buckets = factors.cache("fused").values()
        # Drop older bindings of this bucket, and those of buckets that are gone.
        for key, other in list(bound_before.items()):
            if other.bucket is bound.bucket or other.bucket not in buckets:
                del bound_before[key]
        bound_before[id(tensors)] = bound
        return bound.exchange(peers)

    def parts(self, tensors: Tensors) -> list[Part]:
        """Return the tensors that the first codec accepts, and the others."""
        chosen: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        for name, t in tensors.items():
            if t.shape not in self._accepted:
                self._accepted[t.shape] = self.codec.accepts(t.shape)
            (chosen if self._accepted[t.shape] else others)[name] = t
        return [("codec", self.codec, chosen), ("rest", self.rest, others)]

    @cached_property
    def _accepted(self) -> dict[torch.Size, bool]:
        """Whether the first codec accepts a shape: each is asked about once."""
        return {}


@dataclass(frozen=True, repr=False)
class ByName:
    """Sends tensors whose names match a pattern through its codec, and all others through `rest`.

    Patterns are those of a shell: `ByName({"*.embed*": Cast("bf16")}, rest=...)`. The first that matches counts. What
    its codec declines goes to `rest`, which is exact by default and must accept every shape. All codecs run in the same
    rounds.
    """

    codecs: Mapping[str, Codec] = field(hash=False)
    rest: Codec = field(default_factory=Exact)

    __repr__ = as_code
    accepts = accept_every_shape

    def __post_init__(self) -> None:
        given: object = self.codecs
        if not isinstance(given, Mapping) or not all(isinstance(pattern, str) for pattern in given):
            raise ValueError(
                f"ByName({given!r}): the first argument maps patterns of names to codecs, as in "
                'ByName({"*.embed*": Exact()}, rest=Cast("bf16")).'
            )
        object.__setattr__(self, "codecs", dict(self.codecs))
        for codec in (*self.codecs.values(), self.rest):
            check_codec(f"ByName({self.codecs!r}, rest={self.rest!r})", codec)
        check_rest("ByName", self.rest)

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        """Average each tensor through the codec for its name."""
        return (yield from average_parts(tensors, self.parts(tensors), state, peers, reuse=reuse))

    def parts(self, tensors: Tensors) -> list[Part]:
        """Return the tensors of each pattern that its codec accepts, and the others."""
        chosen: dict[str, dict[str, Tensor]] = {pattern: {} for pattern in self.codecs}
        others: dict[str, Tensor] = {}
        for name, t in tensors.items():
            pattern = next((each for each in self.codecs if fnmatchcase(name, each)), None)
            accepted = pattern is not None and self.codecs[pattern].accepts(t.shape)
            (others if pattern is None or not accepted else chosen[pattern])[name] = t
        parts = [(f"codec {pattern}", self.codecs[pattern], some) for pattern, some in chosen.items()]
        return [*parts, ("rest", self.rest, others)]


def routed(codec: Codec) -> Codec:
    """Return a codec for all shapes: `codec` itself, or with what it declines sent exactly."""
    return codec if codec.accepts(torch.Size([])) else ByShape(codec)


def average_parts(
    tensors: Tensors, parts: Sequence[Part], state: State, peers: Peers, *, reuse: bool
) -> Exchange[Averaged]:
    """Average parts of `tensors`, each through a codec of its own, whose state has the key that is given with it.

    All advance together, and in each round, what can be joined is sent as one message. Those that ask `Decide` wait for
    the others, and ask it as one.
    """
    exchanges = [
        codec.average(some, state.setdefault(key, {}), peers, reuse=reuse) for key, codec, some in parts if some
    ]
    found: dict[int, Averaged] = {}
    held: dict[int, Tensor] = {}
    answers: dict[int, Tensor | None] = dict.fromkeys(range(len(exchanges)))
    while answers:
        # 1. advance each to its next request; requests of one kind, dtype and device can be joined
        joined: dict[object, dict[int, Request]] = {}
        for index, answer in answers.items():
            asked = advance(exchanges[index], answer)
            if isinstance(asked, Done):
                found[index] = asked.result
            elif isinstance(asked, Decide):
                held[index] = asked.ok
            else:
                joins = isinstance(asked, AllToAll | Gather) or (isinstance(asked, Mean) and not asked.wide)
                key = (type(asked), asked.x.dtype, asked.x.device) if joins else index
                joined.setdefault(key, {})[index] = asked
        # 2. answer them
        answers = {}
        if held and not joined:
            ok = yield Decide(all_true([*held.values(), *(end.finite() for end in found.values())]))
            answers, held = dict.fromkeys(held, ok), {}
        for requests in joined.values():
            together = list(requests.values())
            rows = [request for request in together if isinstance(request, AllToAll)]
            if len(together) == 1:
                received = [(yield together[0])]
            else:
                received = yield from (_joined_rows(rows, peers) if rows else _joined(together))
            answers.update(zip(requests, received, strict=True))
    ends = [found[index] for index in range(len(exchanges))]

    def own() -> dict[str, Tensor]:
        return {name: t for end in ends for name, t in end.own().items()}

    def finite() -> Tensor:
        decided = [end for end in ends if end.decided][:1]  # the answer is about all of them
        return all_true([end.finite() for end in decided or ends]) if ends else true()

    mean = {name: t for end in ends for name, t in end.mean.items()}
    return Averaged({name: mean[name] for name in tensors}, own, finite, any(end.decided for end in ends))


def _joined(requests: Sequence[Request]) -> Exchange[list[Tensor]]:
    """Send means, or gathers, of one dtype and device as one, and split its result."""
    sizes = [request.x.numel() for request in requests]
    flat = torch.cat([request.x.reshape(-1) for request in requests])
    shapes = [request.x.shape for request in requests]
    if isinstance(requests[0], Gather):
        rows = (yield Gather(flat)).split(sizes, dim=1)
        return [piece.reshape(-1, *shape) for piece, shape in zip(rows, shapes, strict=True)]
    pieces = (yield Mean(flat)).split(sizes)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _joined_rows(requests: Sequence[AllToAll], peers: Peers) -> Exchange[list[Tensor]]:
    """Send rows of different lengths as one: for each worker, those of the first request, then of the second, ..."""
    widths = [math.prod(request.x.shape[1:]) for request in requests]
    taken = [0] * len(requests)
    parts: list[Tensor] = []
    sizes: list[int] = []
    for rows, run in groupby(zip(*(request.rows for request in requests), strict=True)):  # workers with as many rows
        count = len(list(run))
        ends = [at + count * each for at, each in zip(taken, rows, strict=True)]
        slices = [request.x[at:end] for request, at, end in zip(requests, taken, ends, strict=True)]
        lengths = [each * width for each, width in zip(rows, widths, strict=True)]
        parts.append(torch.cat([x.reshape(count, n) for x, n in zip(slices, lengths, strict=True)], dim=1).reshape(-1))
        sizes += [sum(lengths)] * count
        taken = ends
    received = yield AllToAll(torch.cat(parts), tuple(sizes))  # [workers, mine]
    shapes = [(request.rows[peers.rank], *request.x.shape[1:]) for request in requests]
    pieces = received.split([math.prod(shape) for shape in shapes], dim=1)
    return [piece.reshape(peers.size, *shape) for piece, shape in zip(pieces, shapes, strict=True)]
