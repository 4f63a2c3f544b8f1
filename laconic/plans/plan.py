"""A plan: when workers synchronise, what they send, what they do with the mean, and with whom, as one value.

    Plan(schedule=Every(1), codec=ByShape(ErrorFeedback(LowRank(rank=4))), outer=Adopt(), topology=World())

A plan is frozen, can be compared and hashed, prints as the code that makes it, and can be parsed from that text. The
named methods (`methods.py`) are functions that return plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, TypeAlias, get_args

from laconic.codecs import Codec, Exact
from laconic.exchange import Level
from laconic.plans.nested import Nested
from laconic.plans.outer import Adopt, Outer
from laconic.plans.schedules import GRADIENTS, Every, Never, Payload, Schedule, Streaming, Sync, SyncClock
from laconic.plans.topology import Topology, World
from laconic.values import as_code

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
    outer: Outer = field(default_factory=Adopt)
    topology: Topology = field(default_factory=World)
    buffers: Buffers = "average"
    optimizer_state: OptimizerState = "keep"
    observer: ClassVar[str] = ""
    """The factory of an observer that `attach` adds to the session, as "module:function"."""

    def __post_init__(self) -> None:
        protocols = {
            "schedule": (Schedule, "Every(8)"),
            "codec": (Codec, "Exact()"),
            "outer": (Outer, "Adopt()"),
            "topology": (Topology, "World()"),
        }
        for part, (kind, example) in protocols.items():
            value = getattr(self, part)
            if not isinstance(value, kind) or isinstance(value, type):
                raise TypeError(f"Plan({part}={value!r}): {part} must be a {part}, such as {example}.")
        for option, kinds in (("buffers", Buffers), ("optimizer_state", OptimizerState)):
            if getattr(self, option) not in get_args(kinds):
                known = " or ".join(repr(kind) for kind in get_args(kinds))
                raise ValueError(f"Plan({option}={getattr(self, option)!r}): {option} must be {known}.")
        if isinstance(self.schedule, Never):
            self._check_no_options()
        elif not self.local:
            self._check_no_local_options()

    @cached_property
    def text(self) -> str:
        """`repr(self)`, computed once: headers use it at every step."""
        return repr(self)

    def _check_no_options(self) -> None:
        """Refuse options of averages: this plan has none among all workers. Groups may average gradients inside."""
        defaults = {"codec": Exact(), "outer": Adopt(), "buffers": "average", "optimizer_state": "keep"}
        for option, default in defaults.items():
            if getattr(self, option) != default:
                raise ValueError(
                    f"Plan(schedule=Never(), {option}={getattr(self, option)!r}): workers never synchronise, so "
                    f"{option} would have no effect. Leave it out, or choose a schedule such as Every(8)."
                )

    def _check_no_local_options(self) -> None:
        """Refuse options of rounds of weights: this plan has none."""
        defaults = {"outer": Adopt(), "topology": World(), "buffers": "average", "optimizer_state": "keep"}
        for option, default in defaults.items():
            if getattr(self, option) != default:
                raise ValueError(
                    f"Plan(schedule={self.schedule!r}, {option}={getattr(self, option)!r}): this schedule averages "
                    f"gradients at every step and never weights, so {option} would have no effect. Leave it out, or "
                    "choose a longer period."
                )

    def check_fragments(self, tensors: int) -> None:
        """Refuse a model with fewer trained tensors than this plan has fragments."""
        if self.schedule.fragments > tensors:
            raise ValueError(
                f"{self!r}: a model of {tensors} trained tensors cannot be cut into {self.schedule.fragments} "
                f"fragments. Use {tensors} or fewer."
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
        delayed = isinstance(self.schedule, Streaming) and self.schedule.delay > 0
        return self.local and (delayed or not (self.outer.adopts and isinstance(self.codec, Exact)))

    def __repr__(self) -> str:
        from laconic.plans.text import call_of  # text.py imports this file

        return call_of(self) or as_code(self)
