"""What `session.change(plan)` carries over: residuals that the old codec has not delivered.

Residuals of gradients are added to the gradients of the next step that averages some: the new codec sends them, and
keeps what it cannot send if it has error feedback. Residuals of weight deltas are applied at once, where the plan
changes: each worker subtracts its own from its weights before these are averaged exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.codecs.feedback import residuals_by_name
from laconic.comm.requests import Decide, Exchange, State

CARRIED = "carried"
"""In the state of gradients. Its tensors are found as residuals are: they follow the loss scale, and are saved."""


def carry_gradients(old: State) -> State:
    """Return a new state of gradients, with the residuals of an old one to be delivered."""
    residuals = residuals_by_name(old)
    return {CARRIED: {"residual": residuals}} if residuals else {}


def deliver(tensors: Mapping[str, Tensor], state: State, codec: Codec) -> Exchange:
    """Average `tensors`, with the residuals added in their memory that were carried over."""
    waiting: dict[str, Tensor] = state[CARRIED]["residual"] if CARRIED in state else {}
    here = [name for name in tensors if name in waiting]
    if not here:
        return (yield from codec.average(tensors, state, reuse=True))
    with torch.no_grad():
        for name in here:
            tensors[name].add_(waiting[name])
    end = yield from codec.average(tensors, state, reuse=True)
    ok = end.finite() if end.decided else (yield Decide(end.finite()))
    if bool(ok):  # a step that is void has delivered nothing
        for name in here:
            del waiting[name]
    if not waiting:
        state.pop(CARRIED, None)
    return replace(end, finite=lambda: ok, decided=True)


@torch.no_grad()
def apply_residuals(params: Mapping[str, Tensor], state: State) -> None:
    """Subtract the residuals of deltas from this worker's weights."""
    for name, residual in residuals_by_name(state).items():
        if name in params:
            params[name].sub_(residual.to(params[name].device))
