"""Lockstep: K workers in one process, for tests and for the simulator.

Every worker's exchange advances by one request, then all requests are served together. Workers that request different
things get an error that names them, where a network would hang.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.checks.errors import DesyncError
from laconic.comm.requests import Averaged, Exchange, First, Mean, Request, describe, operation, payload_bytes
from laconic.ledger import Ledger


def lockstep(exchanges: Sequence[Exchange], ledger: Ledger | None = None, phase: str = "test") -> list[Averaged]:
    """Run one exchange a worker to its end and return each worker's result.

    `ledger` records what worker 0 would have sent.
    """
    if not exchanges:
        return []
    answers: list[Tensor | None] = [None] * len(exchanges)
    round_ = 0
    while True:
        round_ += 1
        requests = [_advance(exchange, answer) for exchange, answer in zip(exchanges, answers, strict=True)]
        _check_same(requests, round_)
        pending = [request for request in requests if not isinstance(request, Averaged)]
        if not pending:
            return [result for result in requests if isinstance(result, Averaged)]
        if ledger is not None:
            op = operation(pending[0])
            ledger.record(op, payload_bytes(pending[0]), len(exchanges), phase=phase, round_=round_)
        answers = list(_serve(pending))


def _advance(exchange: Exchange, answer: Tensor | None) -> Request | Averaged:
    try:
        return next(exchange) if answer is None else exchange.send(answer)
    except StopIteration as stop:
        result: Averaged = stop.value
        return result


def _serve(requests: list[Request]) -> list[Tensor]:
    xs, first = torch.stack([request.x for request in requests]), requests[0]
    answer = _mean(xs) if isinstance(first, Mean) else xs[first.worker] if isinstance(first, First) else xs
    return [answer.clone() for _ in requests]


def _mean(xs: Tensor) -> Tensor:
    """Average by differences from the first, in float64: equal inputs come back, and half precision loses nothing."""
    first = xs[0].double()
    return (first + (xs.double() - first).mean(0)).to(xs.dtype)


def _check_same(requests: Sequence[Request | Averaged], round_: int) -> None:
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


def _shown(request: Request | Averaged) -> str:
    if isinstance(request, Averaged):
        return "the end"
    how = ", summed wide" if isinstance(request, Mean) and request.wide else ""
    if isinstance(request, First):
        how = f" from worker {request.worker}"
    return f"{describe(request)} in {request.x.dtype}{how}"
