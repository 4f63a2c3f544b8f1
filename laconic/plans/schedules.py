"""When workers talk.

A schedule is pure: from the number of a step, counted from 1, it tells what is said after that step, as a tuple of
syncs; an empty one is a step of silence. Before `start`, every plan averages gradients exactly, as DDP does; `start` is
the first step at which the method itself applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from math import inf
from typing import ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

from laconic.values import as_code, is_number, is_whole


class Payload(StrEnum):
    """What is averaged: gradients before the optimizer's step, or weights after it."""

    GRADIENT = "gradient"
    WEIGHTS = "weights"


Level: TypeAlias = int | Literal["machine"] | None
"""With whom: groups of so many workers, those of one machine, or (None) all."""


@dataclass(frozen=True)
class Sync:
    """One thing that is averaged at a step: what, among whom, and which fragment of the model (None is all of it)."""

    payload: Payload
    level: Level = None
    part: int | None = None


@dataclass(frozen=True)
class SyncClock:
    """What a schedule may know besides the step: when weights were last averaged, and the learning rate since."""

    since: int
    lr: float = inf


GRADIENTS = (Sync(Payload.GRADIENT),)
WEIGHTS = (Sync(Payload.WEIGHTS),)
SILENCE: tuple[Sync, ...] = ()


@runtime_checkable
class Schedule(Protocol):
    """When workers talk, and about what."""

    @property
    def start(self) -> int:
        """The first step at which the method applies."""
        ...

    @property
    def period(self) -> int:
        """Steps after which the pattern of syncs repeats, once the method applies."""
        ...

    @property
    def fragments(self) -> int:
        """How many parts the model is cut into, which talk at different steps."""
        ...

    def syncs_at(self, step: int, clock: SyncClock | None = None) -> tuple[Sync, ...]:
        """Tell what is averaged at `step`, from `start` on; nothing is a step of silence."""
        ...


@dataclass(frozen=True, repr=False)
class Every:
    """Gradients every step; or, with a longer period, weights every `period` steps.

    >>> Every(1).syncs_at(1)
    (Sync(payload=<Payload.GRADIENT: 'gradient'>, level=None, part=None),)
    >>> [step for step in range(1, 9) if Every(period=4).syncs_at(step)]
    [4, 8]
    """

    period: int = 1
    start: int = 1
    fragments: ClassVar[int] = 1

    __repr__ = as_code

    def __post_init__(self) -> None:
        check_steps("Every", start=self.start, period=self.period)

    def syncs_at(self, step: int, clock: SyncClock | None = None) -> tuple[Sync, ...]:
        """Tell what is averaged at `step`."""
        if step < self.start or self.period == 1:
            return GRADIENTS
        return WEIGHTS if (step - self.start + 1) % self.period == 0 else SILENCE


@dataclass(frozen=True, repr=False)
class PostLocal:
    """Gradients every step before `start`; from then on, weights every `period` steps.

    Lin et al. 2018, arXiv:1808.07217.

    >>> [step for step in range(1, 9) if PostLocal(start=3, period=3).syncs_at(step)]
    [1, 2, 5, 8]
    """

    start: int
    period: int
    fragments: ClassVar[int] = 1

    __repr__ = as_code

    def __post_init__(self) -> None:
        check_steps("PostLocal", start=self.start, period=self.period)

    def syncs_at(self, step: int, clock: SyncClock | None = None) -> tuple[Sync, ...]:
        """Tell what is averaged at `step`."""
        if step < self.start:
            return GRADIENTS
        return WEIGHTS if (step - self.start + 1) % self.period == 0 else SILENCE


@dataclass(frozen=True, repr=False)
class Nested:
    """Weights in groups of growing size with growing periods: `Nested({period: workers in a group})`.

    At each step the largest period that divides it wins. The last groups are the whole world.
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
                f"Nested({given!r}): say for each period how many workers a group has, as in Nested({{4: 8, 16: 32}})."
            )
        object.__setattr__(self, "groups", dict(self.groups))
        for period, size in self.groups.items():
            check_steps("Nested", start=self.start, period=period)
            if not is_whole(size):
                raise ValueError(f"Nested({self.groups!r}): groups of {size!r}: a group has at least 1 worker.")
        _check_growth(self.groups)

    @property
    def period(self) -> int:
        """The longest period."""
        return max(self.groups)

    def syncs_at(self, step: int, clock: SyncClock | None = None) -> tuple[Sync, ...]:
        """Tell which groups average their weights at `step`."""
        if step < self.start:
            return GRADIENTS
        done = step - self.start + 1
        for period, size in reversed(list(self.groups.items())):
            if done % period == 0:
                return (Sync(Payload.WEIGHTS, level=size),)
        return SILENCE


@dataclass(frozen=True, repr=False)
class Quadratic:
    """Weights after a period that grows as the learning rate falls: (growth / lr)², and never below `floor`.

    The quadratic synchronisation rule, Gu et al. 2023, arXiv:2310.14423. The rate is read from the optimizer at the
    first step after each round, and must be the same on all workers.

    >>> schedule = Quadratic(growth=0.02, floor=4)
    >>> [schedule.period_at(lr) for lr in (0.1, 0.01, 0.004)]
    [4, 4, 25]
    """

    growth: float
    floor: int = 4
    start: int = 1
    fragments: ClassVar[int] = 1

    __repr__ = as_code

    def __post_init__(self) -> None:
        check_steps("Quadratic", start=self.start, period=self.floor, period_word="floor")
        if not is_number(self.growth) or self.growth <= 0:
            raise ValueError(
                f"Quadratic(growth={self.growth!r}): growth must be a number above 0. The period is (growth / lr)**2, "
                "so at a peak learning rate of lr, growth = 2 * lr starts with a period of 4."
            )

    @property
    def period(self) -> int:
        """The shortest period."""
        return self.floor

    def period_at(self, lr: float) -> int:
        """Tell how many steps a round takes at this learning rate."""
        grown = (self.growth / lr) ** 2 if lr > 0 else inf
        return max(self.floor, int(min(grown + 1e-9, 2**31)))  # the rule rounds down; 5² is 25, whatever a float says

    def syncs_at(self, step: int, clock: SyncClock | None = None) -> tuple[Sync, ...]:
        """Tell whether weights are averaged at `step`, as `clock` has it."""
        if step < self.start:
            return GRADIENTS
        if clock is None:
            return WEIGHTS if (step - self.start + 1) % self.floor == 0 else SILENCE
        return WEIGHTS if step - max(clock.since, self.start - 1) >= self.period_at(clock.lr) else SILENCE


@dataclass(frozen=True, repr=False)
class Streaming:
    """The model in fragments, each of which talks every `period` steps, at steps of its own.

    What a fragment hears takes effect `delay` steps later, so that training goes on meanwhile. By then the worker's own
    weights have moved: it keeps the share `mix` of them (of their distance, for a delay of 0, nothing).
    Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512.

    >>> {step: sync.part for step in range(1, 9) for sync in Streaming(period=4, fragments=2).syncs_at(step)}
    {2: 1, 4: 0, 6: 1, 8: 0}
    """

    period: int
    fragments: int
    delay: int = 0
    mix: float = 0.5
    start: int = 1

    __repr__ = as_code

    def __post_init__(self) -> None:
        check_steps("Streaming", start=self.start, period=self.period)
        if not is_whole(self.fragments) or self.fragments > self.period:
            raise ValueError(
                f"Streaming(period={self.period}, fragments={self.fragments!r}): there must be from 1 fragment to one "
                f"for each of the {self.period} steps of a period."
            )
        if not is_whole(self.delay, 0) or self.delay >= self.period:
            raise ValueError(
                f"Streaming(period={self.period}, delay={self.delay!r}): a fragment must be heard before it talks "
                f"again, so delay is a whole number from 0 to {self.period - 1}."
            )
        if not is_number(self.mix) or not 0 <= self.mix < 1:
            raise ValueError(
                f"Streaming(mix={self.mix!r}): the share of its own that a worker keeps is from 0 to below 1."
            )

    def syncs_at(self, step: int, clock: SyncClock | None = None) -> tuple[Sync, ...]:
        """Tell which fragments set out at `step`."""
        if step < self.start:
            return GRADIENTS
        place = (step - self.start + 1) % self.period
        part = -(-place * self.fragments // self.period)  # the first whose place is here or later
        due = part < self.fragments and part * self.period // self.fragments == place
        return (Sync(Payload.WEIGHTS, part=part),) if due else SILENCE


def check_steps(what: str, *, start: object, period: object, period_word: str = "period") -> None:
    """Refuse a start or period that is not a whole number from 1 up."""
    for word, value in (("start", start), (period_word, period)):
        if not is_whole(value):
            raise ValueError(
                f"{what}({word}={value!r}): {word} must be a whole number of at least 1, as steps count from 1."
            )


def _check_growth(groups: Mapping[int, int]) -> None:
    levels = list(groups.items())
    for (period, size), (next_period, next_size) in pairwise(levels):
        if next_period <= period:
            raise ValueError(
                f"Nested({groups!r}): period {next_period} stands after {period}. Periods must grow from level to "
                "level."
            )
        if next_size <= size or next_size % size:
            raise ValueError(
                f"Nested({groups!r}): groups of {next_size} stand after groups of {size}. Each size must be a "
                "multiple of the one before it, so that groups nest."
            )
