"""What is done with what was heard.

At the end of a round every worker holds the same anchor (the weights that all agreed on last) and the same mean
delta (anchor − weights: it acts as a gradient). The outer step turns them into the next anchor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from laconic.text import as_code
from laconic.wires.wire import State, Tensors


@runtime_checkable
class Outer(Protocol):
    """The step that follows a round."""

    @property
    def adopts(self) -> bool:
        """Whether the mean itself becomes the weights, so that no anchor is needed to average exactly."""
        ...

    def step(self, anchor: dict[str, Tensor], delta: Tensors, state: State) -> None:
        """Move `anchor`, in place, by the mean `delta`."""
        ...


@dataclass(frozen=True, repr=False)
class Adopt:
    """Plain averaging: the mean of the workers' weights becomes everyone's."""

    __repr__ = as_code

    @property
    def adopts(self) -> bool:
        """Always."""
        return True

    def step(self, anchor: dict[str, Tensor], delta: Tensors, state: State) -> None:
        """Subtract the mean delta."""
        for name, d in delta.items():
            anchor[name].sub_(d.to(anchor[name].dtype))
