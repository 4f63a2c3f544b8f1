"""Running an exchange: to its end, or inside another."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.comm.lockstep import lockstep
from laconic.exchange import Decide, Done, Exchange, Gather, Mean, Request, advance, drive, intercept


def two_rounds() -> Exchange[list[float]]:
    """Return what it is answered."""
    mean = yield Mean(torch.tensor([1.0]))
    rows = yield Gather(mean)
    ok = yield Decide(torch.tensor(True))
    return [*mean.tolist(), *rows.flatten().tolist(), float(ok)]


def served(request: Request | Decide) -> Tensor:
    return request.ok if isinstance(request, Decide) else request.x + 1


def test_drive_answers_every_request_and_returns_the_result() -> None:
    assert drive(two_rounds(), served) == [2.0, 3.0, 1.0]


def test_advance_starts_an_exchange_and_tells_its_end() -> None:
    exchange = two_rounds()
    request = advance(exchange, None)
    assert isinstance(request, Mean)
    assert isinstance(advance(exchange, request.x), Gather)
    assert isinstance(advance(exchange, torch.zeros(0)), Decide)
    end = advance(exchange, torch.tensor(False))
    assert isinstance(end, Done) and end.result == [1.0, 0.0]


def test_intercept_sees_requests_and_answers_and_may_replace_them() -> None:
    seen: list[str] = []

    def see(request: Request | Decide) -> Exchange[Tensor]:
        seen.append(type(request).__name__)
        if isinstance(request, Mean):
            return torch.tensor([7.0])  # nothing is sent
        answer = yield request
        return answer * 2 if isinstance(request, Gather) else answer

    assert lockstep([intercept(two_rounds(), see)]) == [[7.0, 14.0, 1.0]]
    assert seen == ["Mean", "Gather", "Decide"]
