"""Dry runs: nothing is sent, everything is counted.

The codec itself runs, usually on meta tensors, and its requests are written to a ledger. So there is no second formula
for bytes that could differ from the real ones.
"""

from __future__ import annotations

from laconic.exchange import (
    AllToAll,
    Averaged,
    Exchange,
    Gather,
    Rank,
    by_itself,
    operation,
    own_bytes,
    payload_bytes,
    rank_of,
)
from laconic.ledger import Ledger


def dry(exchange: Exchange, ledger: Ledger, workers: int, phase: str = "plan") -> Averaged:
    """Run `exchange` to its end as if `workers` workers took part, and count what one of them sends."""
    sending = by_itself(exchange)
    try:
        request = next(sending)
        for round_ in range(1, 1_000_000):
            while isinstance(request, Rank):
                request = sending.send(rank_of(0, workers))
            own = own_bytes(request, 0)
            ledger.record(operation(request), payload_bytes(request), workers, phase=phase, round_=round_, own=own)
            if isinstance(request, Gather):
                request = sending.send(request.x.new_empty((workers, *request.x.shape)))
            elif isinstance(request, AllToAll):
                request = sending.send(request.x.new_empty((workers, request.rows[0], *request.x.shape[1:])))
            else:
                request = sending.send(request.x)
    except StopIteration as stop:
        result: Averaged = stop.value
        return result
    raise RuntimeError("a codec asked for a million rounds: it does not end")
