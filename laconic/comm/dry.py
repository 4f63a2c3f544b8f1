"""Dry runs: nothing is sent, everything is counted.

The codec itself runs, usually on meta tensors, and its requests are written to a ledger. So there is no second formula
for bytes that could differ from the real ones.
"""

from __future__ import annotations

from itertools import count

from torch import Tensor

from laconic.exchange import (
    AllToAll,
    Decide,
    Exchange,
    Gather,
    Request,
    T,
    drive,
    operation,
    own_bytes,
    payload_bytes,
)
from laconic.ledger import Ledger

MOST_ROUNDS = 1_000_000


def dry(exchange: Exchange[T], ledger: Ledger, workers: int, phase: str = "plan") -> T:
    """Run `exchange` to its end as if `workers` workers took part, and count what the first of them sends."""
    rounds = count(1)

    def serve(request: Request | Decide) -> Tensor:
        if isinstance(request, Decide):
            return request.ok
        if (round_ := next(rounds)) > MOST_ROUNDS:
            raise RuntimeError("a codec asked for a million rounds: it does not end")
        own = own_bytes(request, 0)
        ledger.record(operation(request), payload_bytes(request), workers, phase=phase, round_=round_, own=own)
        if isinstance(request, Gather):
            return request.x.new_empty((workers, *request.x.shape))
        if isinstance(request, AllToAll):
            return request.x.new_empty((workers, request.rows[0], *request.x.shape[1:]))
        return request.x

    return drive(exchange, serve)
