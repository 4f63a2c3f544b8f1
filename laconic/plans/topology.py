"""Topologies: which workers average gradients at local steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from laconic.exchange import Level
from laconic.values import as_code, is_whole


@runtime_checkable
class Topology(Protocol):
    """Which groups of workers average gradients at local steps."""

    @property
    def inner(self) -> Level:
        """The level whose groups average gradients at every step, or None."""
        ...


@dataclass(frozen=True, repr=False)
class World:
    """No groups: at a local step, workers do not communicate."""

    __repr__ = as_code

    @property
    def inner(self) -> Level:
        """None."""
        return None


@dataclass(frozen=True, repr=False)
class Groups:
    """Groups of `size` workers, or the workers of one "machine", average gradients exactly at every local step.

    A group then acts as one worker of the plan: for example DiLoCo between sites and DDP inside each.
    """

    size: int | Literal["machine"]

    __repr__ = as_code

    def __post_init__(self) -> None:
        check_group(f"Groups(size={self.size!r})", self.size)

    @property
    def inner(self) -> Level:
        """The level of the groups."""
        return self.size


def check_group(call: str, size: object) -> None:
    """Refuse what is no size of groups; `call` is what the user wrote."""
    if not is_whole(size, 2) and size != "machine":
        raise ValueError(
            f'{call}: it must be a whole number of at least 2 workers, or "machine" for the workers of one machine.'
        )
