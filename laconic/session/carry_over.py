"""What `session.change(plan)` carries over: residuals that the old codec has not delivered.

Residuals of gradients are added to the next gradients, in equal parts over 32 steps: the new codec sends them, and
keeps what it cannot send if it has error feedback. All at once they would make one gradient many times as long as the
others, and Adam's second moment would shorten the steps after it (docs/log.md, 2026-11-16). Residuals of weight deltas
are applied at once, where the plan changes: each worker subtracts its own from its weights before these are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.codecs.feedback import residuals_by_name
from laconic.exchange import Averaged, Decide, Exchange, Peers, State

PARTS = 32
"""The steps over which residuals of gradients are delivered."""
CARRIED = "carried"
"""In the state of gradients. Its tensors are found as residuals are: they follow the loss scale, and are saved."""


def carry_gradients(old: State) -> State:
    """Return a new state of gradients, with the residuals of an old one to be delivered."""
    residuals = residuals_by_name(old)
    return {CARRIED: {"residual": residuals, "parts": dict.fromkeys(residuals, PARTS)}} if residuals else {}


def deliver(tensors: Mapping[str, Tensor], state: State, codec: Codec, peers: Peers) -> Exchange[Averaged]:
    """Average `tensors`, with the next part of the residuals added in their memory that were carried over."""
    carried = state.get(CARRIED, {"residual": {}, "parts": {}})
    waiting: dict[str, Tensor] = carried["residual"]
    parts: dict[str, int] = carried["parts"]
    here = [name for name in tensors if name in waiting]
    if not here:
        return (yield from codec.average(tensors, state, peers, reuse=True))
    with torch.no_grad():
        for name in here:
            tensors[name].add_(waiting[name], alpha=1 / parts[name])
    end = yield from codec.average(tensors, state, peers, reuse=True)
    ok = end.finite() if end.decided else (yield Decide(end.finite()))
    if bool(ok):  # a step that is void has delivered nothing
        for name in here:
            waiting[name] = waiting[name] * (1 - 1 / parts[name])
            parts[name] -= 1
            if not parts[name]:
                del waiting[name], parts[name]
    if not waiting:
        state.pop(CARRIED, None)
    return replace(end, finite=lambda: ok, decided=True)


@torch.no_grad()
def apply_residuals(params: Mapping[str, Tensor], state: State) -> None:
    """Subtract the residuals of deltas from this worker's weights."""
    for name, residual in residuals_by_name(state).items():
        if name in params:
            params[name].sub_(residual.to(params[name].device))
