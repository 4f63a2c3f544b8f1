"""With whom: which workers average gradients in steps that are otherwise local."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from laconic.plans.schedules import Level
from laconic.values import as_code, is_whole


@runtime_checkable
class Topology(Protocol):
    """Which workers, if not all, average gradients at steps that are otherwise local."""

    @property
    def inner(self) -> Level:
        """The level whose groups average gradients at every step, or None."""
        ...


@dataclass(frozen=True, repr=False)
class World:
    """All workers are alike: a local step is each worker's own."""

    __repr__ = as_code

    @property
    def inner(self) -> Level:
        """No level."""
        return None


@dataclass(frozen=True, repr=False)
class Groups:
    """Groups of `size` workers, or those of one "machine", average gradients exactly at every local step.

    So a group acts as one worker of the plan: DiLoCo between sites, DDP inside each.
    """

    size: int | Literal["machine"]

    __repr__ = as_code

    def __post_init__(self) -> None:
        if not is_whole(self.size, 2) and self.size != "machine":
            raise ValueError(
                f"Groups(size={self.size!r}): a group is a whole number of at least 2 workers, or "
                '"machine" for those of one machine.'
            )

    @property
    def inner(self) -> Level:
        """The level of the groups."""
        return self.size
