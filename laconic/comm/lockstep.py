"""Lockstep: K workers in one process, for tests and for the simulator.

Every worker's exchange advances by one request, then all requests are served together. Workers that request different
things get an error that names them, where a network would hang. `in_turn` makes one exchange of a worker's buckets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from laconic.errors import DesyncError
from laconic.exchange import (
    AllToAll,
    Averaged,
    Decide,
    Exchange,
    First,
    Max,
    Mean,
    Rank,
    Request,
    all_true,
    describe,
    operation,
    own_bytes,
    payload_bytes,
    rank_of,
    true,
)
from laconic.ledger import Ledger

Means: TypeAlias = Callable[[Sequence[Mean]], Tensor]
"""Returns the mean of what every worker asks `Mean` for."""


def exact_mean(requests: Sequence[Mean]) -> Tensor:
    """Average by differences from the first, in float64: equal inputs come back, and half precision loses nothing."""
    xs = torch.stack([request.x for request in requests])
    first = xs[0].double()
    return (first + (xs.double() - first).mean(0)).to(xs.dtype)


def lockstep(
    exchanges: Sequence[Exchange], ledger: Ledger | None = None, phase: str = "test", mean: Means = exact_mean
) -> list[Averaged]:
    """Run one exchange a worker to its end and return each worker's result.

    `ledger` records what worker 0 would have sent. `mean` computes means; `ring.gloo_mean` as processes do.
    """
    if not exchanges:
        return []
    answers: list[Tensor | None] = [None] * len(exchanges)
    round_ = 0
    while True:
        round_ += 1
        requests = [
            _placed(exchange, answer, worker, len(exchanges))
            for worker, (exchange, answer) in enumerate(zip(exchanges, answers, strict=True))
        ]
        _check_same(requests, round_)
        pending = [request for request in requests if not isinstance(request, Averaged)]
        if not pending:
            return [result for result in requests if isinstance(result, Averaged)]
        first = pending[0]
        if ledger is not None and not isinstance(first, Decide):
            size, own = payload_bytes(first), own_bytes(first, 0)
            ledger.record(operation(first), size, len(exchanges), phase=phase, round_=round_, own=own)
        answers = list(serve(pending, mean))


def in_turn(exchanges: Sequence[Exchange]) -> Exchange:
    """Run one worker's exchanges, as of several buckets, one after another; they keep their state together or not."""
    held: list[tuple[Exchange, Tensor]] = []
    ends: list[Averaged] = []
    for exchange in exchanges:
        answer: Tensor | None = None
        while True:
            request = _advance(exchange, answer)
            if isinstance(request, Averaged):
                ends.append(request)
                break
            if isinstance(request, Decide):
                held.append((exchange, request.ok))
                break
            answer = yield request
    undecided = [end.finite for end in ends if not end.decided]
    ok = all_true([*(ok for _, ok in held), *(finite() for finite in undecided)]) if held else true()
    verdict = yield Decide(ok)
    for exchange, _ in held:
        end = _advance(exchange, verdict)
        assert isinstance(end, Averaged), "Decide is the last request of an exchange"
        ends.append(end)
    mean = {name: t for end in ends for name, t in end.mean.items()}
    own, each_finite = [end.own for end in ends], [end.finite for end in ends]
    return Averaged(
        mean,
        lambda: {name: t for each in own for name, t in each().items()},
        lambda: all_true([verdict, *(finite() for finite in each_finite)]),
        decided=True,
    )


def _placed(exchange: Exchange, answer: Tensor | None, worker: int, workers: int) -> Request | Decide | Averaged:
    """Advance an exchange to the next request that the others take part in; an answer is a copy of its own."""
    request = _advance(exchange, None if answer is None else answer.clone())
    while isinstance(request, Rank):
        request = _advance(exchange, rank_of(worker, workers))
    return request


def _advance(exchange: Exchange, answer: Tensor | None) -> Request | Decide | Rank | Averaged:
    try:
        return next(exchange) if answer is None else exchange.send(answer)
    except StopIteration as stop:
        result: Averaged = stop.value
        return result


def serve(requests: Sequence[Request | Decide], mean: Means = exact_mean) -> list[Tensor]:
    """Return the results of the same request of every worker; where they are equal, one tensor for all."""
    first = requests[0]
    if isinstance(first, Decide):
        verdict = all_true([request.ok for request in requests if isinstance(request, Decide)])
        return [verdict] * len(requests)
    if isinstance(first, AllToAll):
        parts = [request.x.split(request.rows) for request in requests if isinstance(request, AllToAll)]
        return [torch.stack(rows) for rows in zip(*parts, strict=True)]
    if isinstance(first, Mean):
        return [mean([request for request in requests if isinstance(request, Mean)])] * len(requests)
    xs = torch.stack([request.x for request in requests if not isinstance(request, Decide)])
    if isinstance(first, Max):
        return [xs.amax(0)] * len(requests)
    return [xs[first.worker] if isinstance(first, First) else xs] * len(requests)


def _check_same(requests: Sequence[Request | Decide | Averaged], round_: int) -> None:
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


def _shown(request: Request | Decide | Averaged) -> str:
    if isinstance(request, Averaged):
        return "the end"
    if isinstance(request, Decide):
        return "Decide"
    how = ", summed wide" if isinstance(request, Mean) and request.wide else ""
    if isinstance(request, AllToAll):
        how = f" in {list(request.rows)} rows"
    if isinstance(request, First):
        how = f" from worker {request.worker}"
    return f"{describe(request)} in {request.x.dtype}{how}"
