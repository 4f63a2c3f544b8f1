"""When workers talk.

A schedule is pure: from the number of a step, counted from 1, it tells what is said after that step. Before
`start`, every schedule averages gradients exactly, as DDP does; `start` is the first step at which the method
itself applies.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from laconic.text import as_code


class Payload(StrEnum):
    """What is averaged: gradients before the optimizer's step, or weights after it."""

    GRADIENT = "gradient"
    WEIGHTS = "weights"


@runtime_checkable
class Schedule(Protocol):
    """When workers talk, and about what."""

    @property
    def start(self) -> int:
        """The first step at which the method applies."""
        ...

    @property
    def period(self) -> int:
        """Steps from one talk to the next, once the method applies."""
        ...

    def at(self, step: int) -> Payload | None:
        """Tell what is averaged at `step`, or None for a step of silence."""
        ...


@dataclass(frozen=True, repr=False)
class Every:
    """Gradients every step; or, with a longer period, weights every `period` steps.

    >>> [Every(1).at(step) for step in (1, 2)]
    [<Payload.GRADIENT: 'gradient'>, <Payload.GRADIENT: 'gradient'>]
    >>> [step for step in range(1, 9) if Every(period=4).at(step)]
    [4, 8]
    """

    period: int = 1
    start: int = 1

    __repr__ = as_code

    def __post_init__(self) -> None:
        check_steps("Every", start=self.start, period=self.period)

    def at(self, step: int) -> Payload | None:
        """Tell what is averaged at `step`."""
        if step < self.start or self.period == 1:
            return Payload.GRADIENT
        return Payload.WEIGHTS if (step - self.start + 1) % self.period == 0 else None


@dataclass(frozen=True, repr=False)
class PostLocal:
    """Gradients every step before `start`; from then on, weights every `period` steps.

    Lin et al. 2018, arXiv:1808.07217.

    >>> [step for step in range(1, 9) if PostLocal(start=3, period=3).at(step)]
    [1, 2, 5, 8]
    """

    start: int
    period: int

    __repr__ = as_code

    def __post_init__(self) -> None:
        check_steps("PostLocal", start=self.start, period=self.period)

    def at(self, step: int) -> Payload | None:
        """Tell what is averaged at `step`."""
        if step < self.start:
            return Payload.GRADIENT
        return Payload.WEIGHTS if (step - self.start + 1) % self.period == 0 else None


def check_steps(what: str, *, start: object, period: object) -> None:
    """Refuse a start or period that is not a whole number from 1 up."""
    for word, value in (("start", start), ("period", period)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"{what}({word}={value!r}): {word} must be a whole number of at least 1, as steps count from 1."
            )
