"""Wires answer what codecs ask: over a process group, between workers in one process, or on paper."""

from laconic.wires.dry import dry
from laconic.wires.lockstep import DivergedError, lockstep
from laconic.wires.wire import Averaged, Exchange, Gather, Mean, Request, State, Tensors

__all__ = [
    "Averaged",
    "DivergedError",
    "Exchange",
    "Gather",
    "Mean",
    "Request",
    "State",
    "Tensors",
    "dry",
    "lockstep",
]
