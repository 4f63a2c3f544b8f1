"""ByShape: tensors that a codec accepts go to it, the others to another codec, in the same rounds."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laconic.codecs.contract import Codec, check_codec
from laconic.codecs.exact import Exact
from laconic.codecs.feedback import ErrorFeedback
from laconic.codecs.low_rank import LowRank
from laconic.comm.requests import Averaged, Exchange, Mean, Request, State, Tensors
from laconic.kernels.choose import fast_by_shape
from laconic.values import as_code


@dataclass(frozen=True, repr=False)
class ByShape:
    """Matrices to one codec; vectors and small tensors, which it declines, to another: exactly, by default.

    Both talk at the same time: means of one dtype that they ask for in the same round travel as one.
    """

    codec: Codec
    rest: Codec = field(default_factory=Exact)

    __repr__ = as_code

    def __post_init__(self) -> None:
        check_codec(f"ByShape({self.codec!r}, rest={self.rest!r})", self.codec)
        check_codec(f"ByShape({self.codec!r}, rest={self.rest!r})", self.rest)
        if not self.rest.accepts(torch.Size([2])) or not self.rest.accepts(torch.Size([])):
            raise ValueError(
                f"ByShape({self.codec}, rest={self.rest}): rest gets what the first codec declines, "
                "so it must accept every shape, as Exact() and Cast(...) do."
            )

    def accepts(self, shape: torch.Size) -> bool:
        """Accept every shape."""
        return True

    def average(self, tensors: Tensors, state: State, *, reuse: bool = False) -> Exchange:
        """Average each tensor through the codec for its shape."""
        fast = self._fast(tensors, state) if reuse else None
        if fast is not None:
            return (yield from fast)
        chosen, others = self._split(tensors)
        parts = [
            (self.codec.average(chosen, state.setdefault("codec", {}), reuse=reuse)) if chosen else None,
            (self.rest.average(others, state.setdefault("rest", {}), reuse=reuse)) if others else None,
        ]
        ends = yield from _together([part for part in parts if part is not None])

        def own() -> dict[str, Tensor]:
            return {name: t for end in ends for name, t in end.own().items()}

        def finite() -> Tensor:
            return torch.stack([end.finite() for end in ends]).all() if ends else torch.tensor(True)

        mean = {name: t for end in ends for name, t in end.mean.items()}
        return Averaged({name: mean[name] for name in tensors}, own, finite)

    def _fast(self, tensors: Tensors, state: State) -> Exchange | None:
        """Return all of it in one piece, where there are kernels for that."""
        feedback = self.codec
        if not isinstance(feedback, ErrorFeedback) or feedback.subtract != "own" or self.rest != Exact():
            return None
        inside = feedback.codec
        return fast_by_shape(inside, self._split, tensors, state) if isinstance(inside, LowRank) else None

    def _split(self, tensors: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Choose the codec of each tensor; each shape is asked about once."""
        accepted: dict[torch.Size, bool] = {}
        chosen: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        for name, t in tensors.items():
            if t.shape not in accepted:
                accepted[t.shape] = self.codec.accepts(t.shape)
            (chosen if accepted[t.shape] else others)[name] = t
        return chosen, others


def _together(exchanges: list[Exchange]) -> Generator[Request, Tensor, list[Averaged]]:
    """Advance all `exchanges` in step; in each round, join the means that can travel as one."""
    ends: dict[int, Averaged] = {}
    answers: dict[int, Tensor | None] = dict.fromkeys(range(len(exchanges)))
    while answers:
        requests: dict[int, Request] = {}
        for index, answer in answers.items():
            try:
                exchange = exchanges[index]
                requests[index] = next(exchange) if answer is None else exchange.send(answer)
            except StopIteration as stop:
                ends[index] = stop.value
        answers = {}
        for members in _alike(requests):
            if len(members) == 1:
                answers[members[0]] = yield requests[members[0]]
                continue
            flat = torch.cat([requests[index].x.reshape(-1) for index in members])
            pieces = (yield Mean(flat)).split([requests[index].x.numel() for index in members])
            for index, piece in zip(members, pieces, strict=True):
                answers[index] = piece.view(requests[index].x.shape)
        _share_the_blame(answers)
    return [ends[index] for index in range(len(exchanges))]


def _share_the_blame(answers: dict[int, Tensor | None]) -> None:
    """Let NaN or Inf in one part's answer show in all: a step is void as a whole, and no part may keep its state."""
    heard = [answer for answer in answers.values() if answer is not None and answer.is_floating_point()]
    if len(heard) < 2:
        return
    blame = torch.stack([answer.sum(dtype=torch.float64) for answer in heard]).sum() * 0.0  # 0, or NaN
    for answer in heard:
        answer.add_(blame.to(answer.dtype))


def _alike(requests: dict[int, Request]) -> list[list[int]]:
    groups: dict[object, list[int]] = {}
    for index, request in requests.items():
        joins = isinstance(request, Mean) and not request.wide
        groups.setdefault((request.x.dtype, request.x.device) if joins else index, []).append(index)
    return list(groups.values())
