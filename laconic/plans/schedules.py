"""Schedules: at which steps workers synchronise, and what.

A schedule is a pure function from the number of a step, counted from 1, to a tuple of syncs, which is empty at a local
step. Before `start`, every plan averages gradients exactly, as DDP does; `start` is the first step at which the method
applies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from math import inf
from typing import ClassVar, Literal, Protocol, TypeAlias, get_args, runtime_checkable

from laconic.exchange import Level
from laconic.values import as_code, is_number, is_whole


class Payload(StrEnum):
    """What is averaged: gradients before the optimizer's step, or weights after it."""

    GRADIENT = "gradient"
    WEIGHTS = "weights"


@dataclass(frozen=True)
class Sync:
    """One average at a step: of what, among whom, and of which fragment of the model (None is the whole model)."""

    payload: Payload
    level: Level = None
    fragment: int | None = None


@dataclass(frozen=True)
class SyncClock:
    """What a schedule may use besides the step: when weights were last averaged, the largest learning rate since."""

    since: int
    lr: float = inf
    elapsed_s: float = 0.0
    """How long ago, on this worker."""


GRADIENTS = (Sync(Payload.GRADIENT),)
WEIGHTS = (Sync(Payload.WEIGHTS),)
NO_SYNC: tuple[Sync, ...] = ()


@runtime_checkable
class Schedule(Protocol):
    """At which steps workers synchronise, and what."""

    @property
    def start(self) -> int:
        """The first step at which the method applies."""
        ...

    @property
    def period(self) -> int:
        """The number of steps after which the syncs repeat, from `start` on."""
        ...

    @property
    def fragments(self) -> int:
        """The number of fragments of the model that synchronise at different steps."""
        ...

    def syncs_at(self, step: int, clock: SyncClock | None = None) -> tuple[Sync, ...]:
        """Return what is averaged at `step`; an empty tuple for a local step."""
        ...


Averages: TypeAlias = Literal["gradients", "weights"]


@dataclass(frozen=True, repr=False)
class Every:
    """Gradients every step; or, with a longer period, weights every `period` steps, and gradients before `start`.

    With `of="weights"`, weights also at period 1: gradients stay each worker's own, and workers average what their
    optimizers made of them (deltas from the last average, where the codec is not `Exact()`). With `start` this is
    post-local SGD, Lin et al. 2018, arXiv:1808.07217.

    >>> Every(1).syncs_at(1)
    (Sync(payload=<Payload.GRADIENT: 'gradient'>, level=None, fragment=None),)
    >>> Every(1, of="weights").syncs_at(1)
    (Sync(payload=<Payload.WEIGHTS: 'weights'>, level=None, fragment=None),)
    >>> [step for step in range(1, 9) if Every(period=4).syncs_at(step)]
    [4, 8]
    >>> [step for step in range(1, 9) if Every(period=3, start=3).syncs_at(step)]
    [1, 2, 5, 8]
    """

    period: int = 1
    start: int = 1
    of: Averages | None = None
    fragments: ClassVar[int] = 1

    __repr__ = as_code

    def __post_init__(self) -> None:
        _check_steps("Every", start=self.start, period=self.period)
        if self.of is not None and self.of not in get_args(Averages):
            raise ValueError(f'Every(of={self.of!r}): of must be "gradients" or "weights", or None for the usual one.')
        if self.of == "gradients" and self.period > 1:
            raise ValueError(
                f'Every(period={self.period}, of="gradients"): gradients are averaged at every step, or steps in '
                'between would use different ones. Use Every(1), or of="weights".'
            )
        if self.of == ("gradients" if self.period == 1 else "weights"):
            object.__setattr__(self, "of", None)  # one value for one meaning

    def syncs_at(self, step: int, clock: SyncClock | None = None) -> tuple[Sync, ...]:
        """Return what is averaged at `step`."""
        of_gradients = self.period == 1 and self.of is None
        return GRADIENTS if of_gradients else _weights_every(self.period, self.start, step)


@dataclass(frozen=True, repr=False)
class Never:
    """Nothing, at any step: each worker trains by itself.

    >>> Never().syncs_at(1)
    ()
    """

    start: ClassVar[int] = 1
    period: ClassVar[int] = 1
    fragments: ClassVar[int] = 1

    __repr__ = as_code

    def syncs_at(self, step: int, clock: SyncClock | None = None) -> tuple[Sync, ...]:
        """Return nothing."""
        return NO_SYNC


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
            _check_steps("Nested", start=self.start, period=period)
            if not is_whole(size):
                raise ValueError(f"Nested({self.groups!r}): groups of {size!r}: a group must have at least 1 worker.")
        for (period, size), (next_period, next_size) in pairwise(self.groups.items()):
            if next_period <= period:
                raise ValueError(
                    f"Nested({self.groups!r}): period {next_period} follows {period}. Periods must increase from level "
                    "to level."
                )
            if next_size <= size or next_size % size:
                raise ValueError(
                    f"Nested({self.groups!r}): groups of {next_size} follow groups of {size}. Each size must be a "
                    "multiple of the one before it, so that smaller groups fit into larger ones."
                )

    @property
    def period(self) -> int:
        """The longest period."""
        return max(self.groups)

    def syncs_at(self, step: int, clock: SyncClock | None = None) -> tuple[Sync, ...]:
        """Return the groups that average their weights at `step`."""
        if step < self.start:
            return GRADIENTS
        done = step - self.start + 1
        for period, size in reversed(list(self.groups.items())):  # the longest period first
            if done % period == 0:
                return (Sync(Payload.WEIGHTS, level=size),)
        return NO_SYNC


@dataclass(frozen=True, repr=False)
class Quadratic:
    """Weights after a period that grows as the learning rate falls: (growth / lr)², but at least `floor`.

    The quadratic synchronisation rule, Gu et al. 2023, arXiv:2310.14423. `lr` is the largest learning rate since the
    last round, of the first optimizer's first group, and must be the same on all workers. So one that falls sets the
    period at the first step of a round, as in the paper, and a warm-up shortens the round that it is in.

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
        _check_steps("Quadratic", start=self.start, period=self.floor, period_name="floor")
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
        """Return the number of steps of a round at this learning rate."""
        grown = (self.growth / lr) ** 2 if lr > 0 else inf
        return max(self.floor, int(min(grown + 1e-9, 2**31)))  # the rule rounds down; 1e-9 absorbs float error

    def syncs_at(self, step: int, clock: SyncClock | None = None) -> tuple[Sync, ...]:
        """Return what is averaged at `step`; the period depends on `clock`."""
        if step < self.start or clock is None:  # without a clock, such as to count bytes: the shortest period
            return _weights_every(self.floor, self.start, step)
        return WEIGHTS if step - max(clock.since, self.start - 1) >= self.period_at(clock.lr) else NO_SYNC


@dataclass(frozen=True, repr=False)
class Timed:
    """Weights after the first step of each worker that ends at least `seconds` after the last round.

    For workers of different speed: each takes as many steps as it can, and nobody waits longer than a step of the
    slowest. Means are weighted by the steps of each worker, or by what it counts (`attach(..., weighted=True)`). What
    all workers count alike is `session.progress`. Each worker measures the time since it left the last round, so clocks
    need not agree.

    >>> [len(Timed(seconds=30).syncs_at(7, SyncClock(since=2, elapsed_s=elapsed_s))) for elapsed_s in (29.9, 30.1)]
    [0, 1]
    """

    seconds: float
    start: int = 1
    period: ClassVar[int] = 0  # not known in steps
    fragments: ClassVar[int] = 1

    __repr__ = as_code

    def __post_init__(self) -> None:
        _check_steps("Timed", start=self.start, period=1)
        if not is_number(self.seconds) or self.seconds <= 0:
            raise ValueError(f"Timed(seconds={self.seconds!r}): seconds must be a number above 0, such as 30.")

    @property
    def every(self) -> str:
        """The time of a round as text, such as "30s"."""
        return f"{float(self.seconds)!r}".removesuffix(".0") + "s"

    def syncs_at(self, step: int, clock: SyncClock | None = None) -> tuple[Sync, ...]:
        """Return what is averaged at `step`, which depends on the time of `clock`; without one, it is a local step."""
        if step < self.start:
            return GRADIENTS
        return WEIGHTS if clock is not None and clock.elapsed_s >= self.seconds else NO_SYNC


def seconds_in(every: object) -> float:
    """Read the time of a round.

    >>> seconds_in("30s"), seconds_in("1.5min"), seconds_in("2h")
    (30.0, 90.0, 7200.0)
    """
    number = r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)"
    match = re.fullmatch(rf"{number} ?(s|min|h)", every) if isinstance(every, str) else None
    if match is None:
        raise ValueError(
            f'every={every!r}: the time of a round is a number and a unit, in quotes, such as "30s", "0.5s" or "2min".'
        )
    return float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]


@dataclass(frozen=True, repr=False)
class Streaming:
    """Fragments of the model, each of which synchronises every `period` steps, at different steps.

    A fragment is some of the model's tensors. In a model of fewer tensors than fragments some are empty: at their steps
    no weights are sent.

    The mean of a fragment takes effect `delay` steps after it was sent, so that training overlaps with communication.
    By then the worker's own weights have moved. With mix=None that move is added to the mean, so that no step is lost
    (CoCoD-SGD, Shen et al. 2019, arXiv:1906.12043). With a number they enter the result with this weight, also where
    there is no delay (Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512).

    >>> {step: sync.fragment for step in range(1, 9) for sync in Streaming(period=4, fragments=2).syncs_at(step)}
    {2: 1, 4: 0, 6: 1, 8: 0}
    """

    period: int
    fragments: int
    delay: int = 0
    mix: float | None = None
    start: int = 1

    __repr__ = as_code

    def __post_init__(self) -> None:
        _check_steps("Streaming", start=self.start, period=self.period)
        if not is_whole(self.fragments) or self.fragments > self.period:
            raise ValueError(
                f"Streaming(period={self.period}, fragments={self.fragments!r}): fragments must be a whole number from "
                f"1 to {self.period}, one for each step of a period."
            )
        if not is_whole(self.delay, 0) or self.delay >= self.period:
            raise ValueError(
                f"Streaming(period={self.period}, delay={self.delay!r}): a fragment must take effect before it is "
                f"sent again, so delay must be a whole number from 0 to {self.period - 1}."
            )
        if self.mix is not None and (not is_number(self.mix) or not 0 <= self.mix < 1):
            raise ValueError(
                f"Streaming(mix={self.mix!r}): mix, the weight of the worker's own weights, must be from 0 to below 1, "
                "or None to keep what they have moved since the fragment was sent."
            )

    def syncs_at(self, step: int, clock: SyncClock | None = None) -> tuple[Sync, ...]:
        """Return the fragment that is sent at `step`, if any."""
        if step < self.start:
            return GRADIENTS
        place = (step - self.start + 1) % self.period  # fragment f is sent at place f * period // fragments
        fragment = -(-place * self.fragments // self.period)  # the first fragment at this step or later
        due = fragment < self.fragments and fragment * self.period // self.fragments == place
        return (Sync(Payload.WEIGHTS, fragment=fragment),) if due else NO_SYNC


def _weights_every(period: int, start: int, step: int) -> tuple[Sync, ...]:
    if step < start:
        return GRADIENTS
    return WEIGHTS if (step - start + 1) % period == 0 else NO_SYNC


def _check_steps(what: str, *, start: object, period: object, period_name: str = "period") -> None:
    """Raise a ValueError unless start and period are whole numbers of at least 1."""
    for name, value in (("start", start), (period_name, period)):
        if not is_whole(value):
            raise ValueError(
                f"{what}({name}={value!r}): {name} must be a whole number of at least 1, as steps count from 1."
            )
