"""ByShape: tensors that one codec accepts go to it, all others to a second codec, in the same rounds."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laconic.codecs.contract import Codec, accept_every_shape, check_codec
from laconic.codecs.exact import Exact
from laconic.codecs.feedback import ErrorFeedback, feedback_state
from laconic.codecs.low_rank import LowRank
from laconic.codecs.low_rank_state import Factors
from laconic.comm.requests import Averaged, Decide, Exchange, Mean, Request, State, Tensors, all_true, true
from laconic.kernels.choose import can_fuse_all, fast_by_shape
from laconic.values import as_code


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
        if not self.rest.accepts(torch.Size([2])) or not self.rest.accepts(torch.Size([])):
            raise ValueError(
                f"ByShape({self.codec}, rest={self.rest}): rest gets what the first codec declines, "
                "so it must accept every shape, as Exact() and Cast(...) do."
            )

    def average(self, tensors: Tensors, state: State, *, reuse: bool = False) -> Exchange:
        """Average each tensor through the codec for its shape."""
        fast = self._fast(tensors, state) if reuse else None
        if fast is not None:
            return (yield from fast)
        chosen, others = self._split(tensors)
        exchanges: list[Exchange] = []
        if chosen:
            exchanges.append(self.codec.average(chosen, state.setdefault("codec", {}), reuse=reuse))
        if others:
            exchanges.append(self.rest.average(others, state.setdefault("rest", {}), reuse=reuse))
        ends = yield from _in_shared_rounds(exchanges)

        def own() -> dict[str, Tensor]:
            return {name: t for end in ends for name, t in end.own().items()}

        def finite() -> Tensor:
            decided = [end for end in ends if end.decided][:1]  # the answer is about all of them
            return all_true([end.finite() for end in decided or ends]) if ends else true()

        mean = {name: t for end in ends for name, t in end.mean.items()}
        return Averaged({name: mean[name] for name in tensors}, own, finite, any(end.decided for end in ends))

    def _fast(self, tensors: Tensors, state: State) -> Exchange | None:
        """Return one fused exchange for both codecs, where kernels for that exist."""
        feedback = self.codec
        if not isinstance(feedback, ErrorFeedback) or feedback.subtract != "own" or self.rest != Exact():
            return None
        if not isinstance(feedback.codec, LowRank) or not can_fuse_all(tensors):
            return None
        residual, inner = feedback_state(state.setdefault("codec", {}))
        return fast_by_shape(feedback.codec, self._split, tensors, residual, Factors(inner))

    def _split(self, tensors: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors that the first codec accepts, and the others; each shape is tested once."""
        accepted: dict[torch.Size, bool] = {}
        chosen: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        for name, t in tensors.items():
            if t.shape not in accepted:
                accepted[t.shape] = self.codec.accepts(t.shape)
            (chosen if accepted[t.shape] else others)[name] = t
        return chosen, others


def _in_shared_rounds(exchanges: list[Exchange]) -> Generator[Request | Decide, Tensor, list[Averaged]]:
    """Advance all `exchanges` together; in each round, send the means that can be joined as one message.

    Those that ask `Decide` wait for the others, and ask it as one.
    """
    ends: dict[int, Averaged] = {}
    held: dict[int, Tensor] = {}
    answers: dict[int, Tensor | None] = dict.fromkeys(range(len(exchanges)))
    while answers:
        requests: dict[int, Request] = {}
        for index, answer in answers.items():
            try:
                request = exchanges[index].send(answer)  # type: ignore[arg-type]  # the first starts it, with None
            except StopIteration as stop:
                ends[index] = stop.value
                continue
            if isinstance(request, Decide):
                held[index] = request.ok
            else:
                requests[index] = request
        answers = {}
        if held and not requests:
            ok = yield Decide(all_true([*held.values(), *(end.finite() for end in ends.values())]))
            answers, held = dict.fromkeys(held, ok), {}
        for members in _joinable(requests):
            if len(members) == 1:
                answers[members[0]] = yield requests[members[0]]
                continue
            flat = torch.cat([requests[index].x.reshape(-1) for index in members])
            pieces = (yield Mean(flat)).split([requests[index].x.numel() for index in members])
            for index, piece in zip(members, pieces, strict=True):
                answers[index] = piece.view(requests[index].x.shape)
    return [ends[index] for index in range(len(exchanges))]


def _joinable(requests: dict[int, Request]) -> list[list[int]]:
    """Group requests that can be sent as one message."""
    groups: dict[object, list[int]] = {}
    for index, request in requests.items():
        joins = isinstance(request, Mean) and not request.wide
        groups.setdefault((request.x.dtype, request.x.device) if joins else index, []).append(index)
    return list(groups.values())
