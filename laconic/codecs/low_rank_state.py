"""The state of `LowRank`. Only this file knows the keys of its dict.

The plain code (`low_rank.py`), the CPU path (`kernels/cpu.py`) and the CUDA path (`kernels/cuda/fused.py`) read and
write the state through `Factors`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from laconic.exchange import State


@dataclass(frozen=True, eq=False)
class Factors:
    """A view of the state dict of `LowRank`; everything in it is keyed by parameter name."""

    state: State

    @property
    def p(self) -> dict[str, Tensor]:
        """The last P of each matrix, [rows, rank]."""
        p: dict[str, Tensor] = self.state.setdefault("p", {})
        return p

    @property
    def q(self) -> dict[str, Tensor]:
        """The last Q of each matrix, [columns, rank]."""
        q: dict[str, Tensor] = self.state.setdefault("q", {})
        return q

    def turn(self, name: str) -> int:
        """Return the number of calls that updated the matrix `name`."""
        turn: int = self.state.get("turn", {}).get(name, 0)
        return turn

    def sends_q(self, name: str) -> bool:
        """Return whether alternating rounds send Q at this call (odd turns), and not P (even turns)."""
        return self.turn(name) % 2 == 1

    def in_step(self, names: Iterable[str]) -> bool:
        """Return whether all these matrices send the same factor at this call."""
        turns: dict[str, int] = self.state.get("turn", {})
        return len({turns.get(name, 0) % 2 for name in names}) == 1

    def advance(self, names: Iterable[str]) -> None:
        """Count a call for these matrices."""
        turns: dict[str, int] = self.state.setdefault("turn", {})
        turns.update({name: turns.get(name, 0) + 1 for name in names})

    def cache(self, key: str) -> dict[Any, Any]:
        """Return a dict for what kernels prepare once for each memory layout. It is never saved."""
        cache: dict[Any, Any] = self.state.setdefault(f"_{key}", {})
        return cache
