"""How exchanges run: over a process group, in lockstep in one process, or dry, where bytes are only counted."""

from laconic.comm.dry import dry
from laconic.comm.lockstep import lockstep
from laconic.exchange import Averaged, Decide, Exchange, First, Gather, Mean, Peers, Request, State, Tensors

__all__ = [
    "Averaged",
    "Decide",
    "Exchange",
    "First",
    "Gather",
    "Mean",
    "Peers",
    "Request",
    "State",
    "Tensors",
    "dry",
    "lockstep",
]
