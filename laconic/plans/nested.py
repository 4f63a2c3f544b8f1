"""Nested averaging: groups of growing size with growing periods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from laconic.plans.schedules import GRADIENTS, NO_SYNC, Payload, Sync, SyncClock, check_steps
from laconic.values import as_code, is_whole


@dataclass(frozen=True, repr=False)
class Nested:
    """Weights in groups of growing size with growing periods: `Nested({period: workers in a group})`.

    At each step the largest period that divides it applies. The last groups contain all workers.
    Hierarchical SGD, Wang et al. 2020, arXiv:2010.12998.

    >>> schedule = Nested({2: 2, 4: 8})
    >>> {step: sync.level for step in range(1, 9) for sync in schedule.syncs_at(step)}
    {2: 2, 4: 8, 6: 2, 8: 8}
    """

    groups: Mapping[int, int] = field(hash=False)
    start: int = 1
    fragments: ClassVar[int] = 1

    __repr__ = as_code

    def __post_init__(self) -> None:
        given: object = self.groups
        if not isinstance(given, Mapping) or not given:
            raise ValueError(
                f"Nested({given!r}): groups must map periods to numbers of workers, as in Nested({{4: 8, 16: 32}})."
            )
        object.__setattr__(self, "groups", dict(self.groups))
        for period, size in self.groups.items():
            check_steps("Nested", start=self.start, period=period)
            if not is_whole(size):
                raise ValueError(f"Nested({self.groups!r}): groups of {size!r}: a group must have at least 1 worker.")
        _check_growth(self.groups)

    @property
    def period(self) -> int:
        """The longest period."""
        return max(self.groups)

    def syncs_at(self, step: int, clock: SyncClock | None = None) -> tuple[Sync, ...]:
        """Return the groups that average their weights at `step`."""
        if step < self.start:
            return GRADIENTS
        done = step - self.start + 1
        for period, size in reversed(list(self.groups.items())):
            if done % period == 0:
                return (Sync(Payload.WEIGHTS, level=size),)
        return NO_SYNC


def _check_growth(groups: Mapping[int, int]) -> None:
    levels = list(groups.items())
    for (period, size), (next_period, next_size) in pairwise(levels):
        if next_period <= period:
            raise ValueError(
                f"Nested({groups!r}): period {next_period} follows {period}. Periods must increase from level to level."
            )
        if next_size <= size or next_size % size:
            raise ValueError(
                f"Nested({groups!r}): groups of {next_size} follow groups of {size}. Each size must be a "
                "multiple of the one before it, so that smaller groups fit into larger ones."
            )
