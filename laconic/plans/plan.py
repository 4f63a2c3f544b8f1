"""A plan: when workers synchronise, what they send, what they do with the mean, and with whom, as one value.

    Plan(schedule=Every(16), codec=ErrorFeedback(Quantized(2)), outer=Nesterov(lr=1, momentum=0), topology=World())

A plan is frozen, can be compared and hashed, prints as the code that makes it, and can be parsed from that text. The
named methods (`methods.py`) are functions that return plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from laconic.codecs import Codec, Exact
from laconic.errors import PlanError
from laconic.exchange import Level
from laconic.plans.outer import Nesterov, Outer
from laconic.plans.schedules import (
    GRADIENTS,
    Every,
    Nested,
    Never,
    Payload,
    Schedule,
    Streaming,
    Sync,
    SyncClock,
    Timed,
)
from laconic.plans.topology import Topology, World
from laconic.values import as_code, default_of

if TYPE_CHECKING:
    from laconic.plans.targets import ModelFacts

Buffers: TypeAlias = Literal["average", "leader", "keep"]
OptimizerState: TypeAlias = Literal["keep", "average", "reset"]


@dataclass(frozen=True, repr=False)
class Plan:
    """When workers synchronise and what, how it is encoded, what is done with the mean, and with whom.

    `buffers` is what a round of weights does with BatchNorm statistics and other buffers, `optimizer_state` what it
    does with the optimizer's moments.

    >>> from laconic import ByShape, ErrorFeedback, LowRank, power_sgd
    >>> Plan(codec=ByShape(ErrorFeedback(LowRank(rank=2)))) == power_sgd(rank=2, bits=None)
    True
    >>> power_sgd()
    power_sgd(rank=32, bits=4)
    """

    schedule: Schedule = field(default_factory=Every)
    codec: Codec = field(default_factory=Exact)
    outer: Outer = field(default_factory=partial(Nesterov, lr=1.0, momentum=0.0))
    topology: Topology = field(default_factory=World)
    buffers: Buffers = "average"
    optimizer_state: OptimizerState = "keep"

    def __post_init__(self) -> None:
        protocols = {
            "schedule": (Schedule, "Every(8)"),
            "codec": (Codec, "Exact()"),
            "outer": (Outer, "Nesterov()"),
            "topology": (Topology, "World()"),
        }
        for name, (kind, example) in protocols.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, type):
                raise TypeError(f"Plan({name}={value!r}): {name} must be a {name}, such as {example}.")
        for option, kinds in (("buffers", Buffers), ("optimizer_state", OptimizerState)):
            if getattr(self, option) not in get_args(kinds):
                known = " or ".join(repr(kind) for kind in get_args(kinds))
                raise ValueError(f"Plan({option}={getattr(self, option)!r}): {option} must be {known}.")
        if isinstance(self.schedule, Timed) and self.topology.inner is not None:
            raise ValueError(
                f"Plan(schedule={self.schedule!r}, topology={self.topology!r}): the workers of a group average "
                "gradients in every step, so all take as many, and a round by time ends at another step on each. Leave "
                f"the group out, or choose rounds by steps, such as diloco(period=16, group={self.topology.inner!r})."
            )
        if isinstance(self.schedule, Never):  # groups may average gradients inside
            options = ("codec", "outer", "buffers", "optimizer_state")
            self._check_defaults(options, "workers never synchronise", "choose a schedule such as Every(8)")
        elif not self.local:
            why = "this schedule averages gradients at every step and never weights"
            self._check_defaults(("outer", "topology", "buffers", "optimizer_state"), why, "choose a longer period")

    def _check_defaults(self, options: tuple[str, ...], why: str, way_out: str) -> None:
        """Refuse options that would have no effect."""
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in options and value != default_of(f):
                raise ValueError(
                    f"Plan(schedule={self.schedule!r}, {f.name}={value!r}): {why}, so {f.name} would have no effect. "
                    f"Leave it out, or {way_out}."
                )

    @cached_property
    def text(self) -> str:
        """`repr(self)`, computed once: headers use it at every step."""
        return repr(self)

    def resolved(self, facts: ModelFacts) -> Plan:
        """Return what this plan becomes on a model: itself, unless it is named by a target of bytes (`targets.py`)."""
        return self

    def observer(self) -> object:
        """Return the `StepObserver` that `attach` adds to the session; None for none."""
        return None

    def check_by_steps(self, what: str) -> None:
        """Refuse this plan if its rounds end by the clock, for `what` counts steps: they differ between the workers."""
        if isinstance(self.schedule, Timed):
            raise PlanError(
                f"{what} needs as many steps from all workers, and in a round of {self!r} each takes as many as it "
                "can. Use rounds by steps: diloco(period=...), with the steps that such a round has."
            )

    def syncs_at(self, step: int, clock: SyncClock | None = None) -> tuple[Sync, ...]:
        """Return what is averaged at `step`, and among whom; an empty tuple for a local step."""
        if step < self.schedule.start:
            return GRADIENTS
        syncs = self.schedule.syncs_at(step, clock)
        if self.topology.inner is not None:
            return (Sync(Payload.GRADIENT, self.topology.inner), *syncs)
        return syncs

    def codec_of(self, sync: Sync, step: int) -> Codec:
        """Return the codec of a sync: `Exact()` before `start` and inside groups, else the codec of the plan."""
        return Exact() if step < self.schedule.start or not self.is_outermost(sync) else self.codec

    def is_outermost(self, sync: Sync) -> bool:
        """Return whether a sync is among all workers; the plan's codec and outer step apply only there."""
        return sync.level is None or sync.level == self.levels[-1]

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels of the plan, innermost first; None means all workers."""
        sizes: list[Level] = [] if self.topology.inner is None else [self.topology.inner]
        nested = self.schedule.groups.values() if isinstance(self.schedule, Nested) else (None,)
        return (*sizes, *nested)

    @cached_property
    def local(self) -> bool:
        """Whether workers hold different weights after some steps."""
        return self.schedule.syncs_at(self.schedule.start) != GRADIENTS

    @cached_property
    def needs_anchor(self) -> bool:
        """Whether rounds average deltas from an anchor instead of the weights themselves."""
        keeps_own = isinstance(self.schedule, Streaming) and bool(self.schedule.delay or self.schedule.mix)
        return self.local and (keeps_own or not (self.outer.adopts and isinstance(self.codec, Exact)))

    def __repr__(self) -> str:
        from laconic.plans.text import call_of  # text.py imports this file

        return call_of(self) or as_code(self)
