"""Lockstep: K workers in one process, for tests and for the simulator.

Every worker's exchange advances by one request, then all requests are served together. Workers that request different
things get an error that names them, where a network would hang. `in_turn` makes one exchange of a worker's buckets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from laconic.comm.collectives import weighted_mean
from laconic.errors import DesyncError
from laconic.exchange import (
    AllToAll,
    Averaged,
    Decide,
    Done,
    Exchange,
    First,
    Max,
    Mean,
    Request,
    T,
    advance,
    all_true,
    describe,
    operation,
    own_bytes,
    payload_bytes,
    true,
)
from laconic.ledger import Ledger

Means: TypeAlias = Callable[[Sequence[Mean]], Tensor]
"""Returns the mean of what every worker asks `Mean` for."""


def exact_mean(requests: Sequence[Mean]) -> Tensor:
    """Average by differences from the first, in float64: equal inputs come back, and half precision loses nothing."""
    xs = torch.stack([request.x for request in requests])
    if (shares := requests[0].shares) is not None:
        return weighted_mean(list(xs.double()), shares).to(xs.dtype)
    first = xs[0].double()
    return (first + (xs.double() - first).mean(0)).to(xs.dtype)


def lockstep(
    exchanges: Sequence[Exchange[T]], ledger: Ledger | None = None, phase: str = "test", mean: Means = exact_mean
) -> list[T]:
    """Run one exchange a worker to its end and return each worker's result.

    `ledger` records what worker 0 would have sent. `mean` computes means; `ring.gloo_mean` as processes do.
    """
    if not exchanges:
        return []
    answers: list[Tensor | None] = [None] * len(exchanges)
    round_ = 0
    while True:
        round_ += 1
        # Each worker gets a copy of the answer: they share no memory.
        requests = [
            advance(exchange, None if answer is None else answer.clone())
            for exchange, answer in zip(exchanges, answers, strict=True)
        ]
        _check_same(requests, round_)
        pending = [request for request in requests if not isinstance(request, Done)]
        if not pending:
            return [end.result for end in requests if isinstance(end, Done)]
        first = pending[0]
        if ledger is not None and not isinstance(first, Decide):
            size, own = payload_bytes(first), own_bytes(first, 0)
            ledger.record(operation(first), size, len(exchanges), phase=phase, round_=round_, own=own)
        answers = list(serve(pending, mean))


def in_turn(exchanges: Sequence[Exchange[T]]) -> Exchange[list[T]]:
    """Run one worker's exchanges, as of several buckets, one after another; they keep their state together or not."""
    held: dict[int, Tensor] = {}
    ends: dict[int, T] = {}
    for index, exchange in enumerate(exchanges):
        asked = advance(exchange, None)
        while not isinstance(asked, Decide | Done):
            asked = advance(exchange, (yield asked))
        if isinstance(asked, Decide):
            held[index] = asked.ok
        else:
            ends[index] = asked.result
    undecided = [end.finite for end in ends.values() if isinstance(end, Averaged) and not end.decided]
    answer = yield Decide(all_true([*held.values(), *(finite() for finite in undecided)]) if held else true())
    for index in held:
        end = advance(exchanges[index], answer)
        assert isinstance(end, Done), "Decide is the last request of an exchange"
        ends[index] = end.result
    return [ends[index] for index in range(len(exchanges))]


def serve(requests: Sequence[Request | Decide], mean: Means = exact_mean) -> list[Tensor]:
    """Return the results of the same request of every worker; where they are equal, one tensor for all."""
    first = requests[0]
    if isinstance(first, Decide):
        return [all_true([request.ok for request in requests if isinstance(request, Decide)])] * len(requests)
    if isinstance(first, AllToAll):
        parts = [request.x.split(request.rows) for request in requests if isinstance(request, AllToAll)]
        return [torch.stack(rows) for rows in zip(*parts, strict=True)]
    if isinstance(first, Mean):
        return [mean([request for request in requests if isinstance(request, Mean)])] * len(requests)
    xs = torch.stack([request.x for request in requests if not isinstance(request, Decide)])
    if isinstance(first, Max):
        return [xs.amax(0)] * len(requests)
    return [xs[first.worker] if isinstance(first, First) else xs] * len(requests)


def _check_same(requests: Sequence[Request | Decide | Done[Any]], round_: int) -> None:
    shown = [_shown(request) for request in requests]
    counts = Counter(shown)
    if len(counts) == 1:
        return
    usual, usual_count = counts.most_common(1)[0]
    worker = next(index for index, each in enumerate(shown) if each != usual)
    others = f"{usual_count} other{'s' if usual_count > 1 else ''}"
    raise DesyncError(
        f"worker {worker} asked for {shown[worker]} while {others} asked for {usual}, in round {round_}.\n"
        "  Every worker must ask for the same things in the same order. Does its data decide what it sends?"
    )


def _shown(request: Request | Decide | Done[Any]) -> str:
    if isinstance(request, Done):
        return "the end"
    if isinstance(request, Decide):
        return "Decide"
    how = ""
    if isinstance(request, Mean):
        how = f"{', summed wide' if request.wide else ''}{f', by {request.shares}' if request.shares else ''}"
    if isinstance(request, AllToAll):
        how = f" in {list(request.rows)} rows"
    if isinstance(request, First):
        how = f" from worker {request.worker}"
    return f"{describe(request)} in {request.x.dtype}{how}"
