"""Plans: the whole choice in one value.

    Plan(schedule=Every(1), codec=ByShape(ErrorFeedback(LowRank(rank=4))), outer=Adopt(), topology=World())

and names for the methods that people know: `ddp()`, `power_sgd(rank=4)`, `post_local_sgd(period=16)`,
`diloco(period=100)` and so on. A plan is frozen, compares and hashes, prints as the code that makes it, and parses
back from that text (`plan`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from inspect import signature
from typing import Literal, TypeAlias, get_args

from laconic.codecs import Batched, ByShape, Cast, Codec, ErrorFeedback, Exact, LowRank
from laconic.outer import Adopt, Nesterov, Optim, Outer
from laconic.schedules import (
    GRADIENTS,
    Every,
    Level,
    Nested,
    Pace,
    Payload,
    PostLocal,
    Quadratic,
    Schedule,
    Streaming,
    Turn,
)
from laconic.text import PlanError, as_code, call, parse
from laconic.topology import Groups, Topology, World

Buffers: TypeAlias = Literal["average", "leader", "keep"]
OptimizerState: TypeAlias = Literal["keep", "average", "reset"]


@dataclass(frozen=True, repr=False)
class Plan:
    """When workers talk, how it is said, what is done with what was heard, and with whom.

    `buffers` says what a round of weights does with BatchNorm statistics and other buffers, `optimizer_state` what it
    does with the optimizer's moments.

    >>> Plan(codec=ByShape(ErrorFeedback(LowRank(rank=2, rounds="alternating")))) == power_sgd(rank=2)
    True
    >>> power_sgd(rank=2)
    power_sgd(rank=2)
    """

    schedule: Schedule = field(default_factory=Every)
    codec: Codec = field(default_factory=Exact)
    outer: Outer = field(default_factory=Adopt)
    topology: Topology = field(default_factory=World)
    buffers: Buffers = "average"
    optimizer_state: OptimizerState = "keep"

    def __post_init__(self) -> None:
        wanted = {
            "schedule": (Schedule, "Every(8)"),
            "codec": (Codec, "Exact()"),
            "outer": (Outer, "Adopt()"),
            "topology": (Topology, "World()"),
        }
        for part, (kind, example) in wanted.items():
            value = getattr(self, part)
            if not isinstance(value, kind) or isinstance(value, type):
                raise TypeError(f"Plan({part}={value!r}): {part} must be a {part}, such as {example}.")
        for word, kinds in (("buffers", Buffers), ("optimizer_state", OptimizerState)):
            if getattr(self, word) not in get_args(kinds):
                known = " or ".join(repr(kind) for kind in get_args(kinds))
                raise ValueError(f"Plan({word}={getattr(self, word)!r}): {word} must be {known}.")
        if not self.local:
            self._refuse_what_only_local_plans_have()

    @cached_property
    def text(self) -> str:
        """How it is written, kept for those who ask at every step."""
        return repr(self)

    def _refuse_what_only_local_plans_have(self) -> None:
        defaults = {"outer": Adopt(), "topology": World(), "buffers": "average", "optimizer_state": "keep"}
        for word, default in defaults.items():
            if getattr(self, word) != default:
                raise ValueError(
                    f"Plan(schedule={self.schedule!r}, {word}={getattr(self, word)!r}): this schedule averages "
                    f"gradients at every step and never weights, so {word} would have no effect. Leave it out, or "
                    "choose a longer period."
                )

    def at(self, step: int, pace: Pace | None = None) -> tuple[Turn, ...]:
        """Tell what is averaged at `step`, and among whom; nothing is a step of silence."""
        if step < self.schedule.start:
            return GRADIENTS
        turns = self.schedule.at(step, pace)
        if self.topology.inner is not None:
            return (Turn(Payload.GRADIENT, self.topology.inner), *turns)
        return turns

    def codec_of(self, turn: Turn, step: int) -> Codec:
        """Tell how a turn is said: exactly before `start` and inside groups, as the plan has it among all."""
        return Exact() if step < self.schedule.start or not self.is_outermost(turn) else self.codec

    def is_outermost(self, turn: Turn) -> bool:
        """Tell whether a turn is among all workers, where codec and outer step apply."""
        return turn.level is None or turn.level == self.levels[-1]

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels that the plan names, innermost first; None, all workers, where it does not say how many."""
        sizes: list[Level] = [] if self.topology.inner is None else [self.topology.inner]
        nested = self.schedule.groups.values() if isinstance(self.schedule, Nested) else (None,)
        return (*sizes, *nested)

    @property
    def local(self) -> bool:
        """Whether there are steps after which workers hold different weights."""
        return self.schedule.at(self.schedule.start) != GRADIENTS

    @property
    def needs_anchor(self) -> bool:
        """Whether rounds exchange deltas from an anchor, and do not just average the weights themselves."""
        delayed = isinstance(self.schedule, Streaming) and self.schedule.delay > 0
        return self.local and (delayed or not (self.outer.adopts and isinstance(self.codec, Exact)))

    def __repr__(self) -> str:
        for name, (method, arguments) in _METHODS.items():
            given = arguments(self)
            if given is not None and method(**given) == self:
                return call(name, _shown(method, given))
        return as_code(self)


def ddp() -> Plan:
    """Average gradients exactly at every step, as DDP does."""
    return Plan()


def power_sgd(
    rank: int = 4,
    start: int = 1,
    min_compression: float = 2,
    rounds: Literal["two", "alternating"] = "alternating",
    feedback: bool = True,
    warm_start: bool = True,
    seed: int = 0,
) -> Plan:
    """Average gradients at every step, each matrix as two thin factors (PowerSGD, arXiv:1905.13727).

    From step `start` on; before it, exactly.

    >>> power_sgd(rank=1, rounds="two").codec
    ByShape(codec=ErrorFeedback(codec=LowRank(rank=1)))
    """
    if not isinstance(feedback, bool):
        raise ValueError(f"power_sgd(feedback={feedback!r}): feedback must be True or False.")
    codec: Codec = LowRank(rank, min_compression, rounds, warm_start, seed)
    return Plan(Every(1, start), ByShape(ErrorFeedback(codec) if feedback else codec))


Group: TypeAlias = int | Literal["machine"] | None


def post_local_sgd(
    start: int = 1,
    period: int = 16,
    group: Group = None,
    buffers: Buffers = "average",
    optimizer_state: OptimizerState = "keep",
) -> Plan:
    """Average gradients at every step before `start`, then weights every `period` steps (arXiv:1808.07217).

    With `group`, that many workers, or those of one "machine", go on averaging gradients among themselves.
    """
    return Plan(PostLocal(start, period), Exact(), Adopt(), _topology(group), buffers, optimizer_state)


def hierarchical_sgd(
    groups: Mapping[int, int],
    start: int = 1,
    buffers: Buffers = "average",
    optimizer_state: OptimizerState = "keep",
) -> Plan:
    """Average weights in groups of growing size with growing periods (arXiv:2010.12998).

    >>> hierarchical_sgd({4: 8, 16: 32})
    hierarchical_sgd(groups={4: 8, 16: 32})
    """
    return Plan(Nested(groups, start), buffers=buffers, optimizer_state=optimizer_state)


def diloco(
    period: int = 100,
    lr: float = 0.7,
    momentum: float = 0.9,
    codec: Codec | None = None,
    start: int = 1,
    group: Group = None,
    buffers: Buffers = "average",
    optimizer_state: OptimizerState = "keep",
) -> Plan:
    """Average deltas every `period` steps and follow them with Nesterov momentum (DiLoCo, arXiv:2311.08105)."""
    codec = Exact() if codec is None else codec
    return Plan(PostLocal(start, period), codec, Nesterov(lr, momentum), _topology(group), buffers, optimizer_state)


def streaming_diloco(
    period: int = 100,
    fragments: int = 4,
    delay: int = 1,
    lr: float = 0.7,
    momentum: float = 0.9,
    codec: Codec | None = None,
    mix: float = 0.5,
    start: int = 1,
    group: Group = None,
    buffers: Buffers = "average",
    optimizer_state: OptimizerState = "keep",
) -> Plan:
    """Do the same in fragments that talk at different steps, while training goes on (arXiv:2501.18512)."""
    schedule = Streaming(period, fragments, delay, mix, start)
    codec = Exact() if codec is None else codec
    return Plan(schedule, codec, Nesterov(lr, momentum), _topology(group), buffers, optimizer_state)


def qsr(
    growth: float,
    floor: int = 4,
    start: int = 1,
    group: Group = None,
    buffers: Buffers = "average",
    optimizer_state: OptimizerState = "keep",
) -> Plan:
    """Average weights ever more seldom as the learning rate falls: (growth / lr)² steps apart (arXiv:2310.14423)."""
    return Plan(Quadratic(growth, floor, start), Exact(), Adopt(), _topology(group), buffers, optimizer_state)


def _topology(group: Group) -> Topology:
    return World() if group is None else Groups(group)


def _no_arguments(plan: Plan) -> dict[str, object]:
    return {}


def _power_sgd_arguments(plan: Plan) -> dict[str, object] | None:
    if not isinstance(plan.codec, ByShape):
        return None
    inner = plan.codec.codec
    feedback = isinstance(inner, ErrorFeedback)
    if isinstance(inner, ErrorFeedback):
        inner = inner.codec
    if not isinstance(inner, LowRank):
        return None
    given = {f.name: getattr(inner, f.name) for f in fields(inner)}
    return given | {"start": plan.schedule.start, "feedback": feedback}


def _local_arguments(kind: type[Schedule], outer: bool) -> Callable[[Plan], dict[str, object] | None]:
    """Read the arguments of a method whose schedule is of this kind, with or without an outer step."""

    def arguments(plan: Plan) -> dict[str, object] | None:
        if type(plan.schedule) is not kind:
            return None
        given: dict[str, object] = {f.name: getattr(plan.schedule, f.name) for f in fields(plan.schedule)}  # type: ignore[arg-type]
        if outer:
            if not isinstance(plan.outer, Nesterov):
                return None
            given |= {"lr": plan.outer.lr, "momentum": plan.outer.momentum, "codec": plan.codec}
        if kind is not Nested:
            given["group"] = plan.topology.inner
        return given | {"buffers": plan.buffers, "optimizer_state": plan.optimizer_state}

    return arguments


_METHODS: dict[str, tuple[Callable[..., Plan], Callable[[Plan], dict[str, object] | None]]] = {
    "ddp": (ddp, _no_arguments),
    "power_sgd": (power_sgd, _power_sgd_arguments),
    "post_local_sgd": (post_local_sgd, _local_arguments(PostLocal, outer=False)),
    "hierarchical_sgd": (hierarchical_sgd, _local_arguments(Nested, outer=False)),
    "diloco": (diloco, _local_arguments(PostLocal, outer=True)),
    "streaming_diloco": (streaming_diloco, _local_arguments(Streaming, outer=True)),
    "qsr": (qsr, _local_arguments(Quadratic, outer=False)),
}
"""The named methods, each with the arguments that would make a given plan, if any could."""


_VOCABULARY: dict[str, Callable[..., object]] = {
    **{name: method for name, (method, _) in _METHODS.items()},
    **{kind.__name__: kind for kind in (Plan, Every, PostLocal, Nested, Quadratic, Streaming)},
    **{kind.__name__: kind for kind in (Adopt, Nesterov, Optim, World, Groups)},
    **{kind.__name__: kind for kind in (Exact, Cast, LowRank, ErrorFeedback, ByShape, Batched)},
}
_ALWAYS_SHOWN = ("rank", "period", "fragments")


def plan(text: str) -> Plan:
    """Read a plan from its text; nothing is evaluated.

    >>> plan("power_sgd(rank=2)") == power_sgd(rank=2)
    True
    >>> plan("power_sdg(rank=2)")
    Traceback (most recent call last):
    laconic.text.PlanError: 'power_sdg(rank=2)': there is no 'power_sdg'. Did you mean power_sgd?
    """
    value = parse(text, _VOCABULARY)
    if not isinstance(value, Plan):
        raise PlanError(
            f"{text!r} is a {type(value).__name__}, and a part of a plan at most. "
            "Write a method such as power_sgd(rank=4), or Plan(schedule=..., codec=...)."
        )
    return value


def plan_from_env(default: Plan | None = None) -> Plan:
    """Read the plan that `laconic compare --script` has left in LACONIC_PLAN, or give `default`, or `ddp()`.

    >>> plan_from_env(default=power_sgd(rank=2))
    power_sgd(rank=2)
    """
    text = os.environ.get("LACONIC_PLAN")
    if text is None:
        return ddp() if default is None else default
    return plan(text)


def _shown(method: Callable[..., Plan], given: dict[str, object]) -> dict[str, object]:
    """Leave out what equals the default, but for what tells plans apart at a glance."""
    parameters = signature(method).parameters.values()
    shown = {p.name: given[p.name] for p in parameters if given[p.name] != p.default or p.name in _ALWAYS_SHOWN}
    return {name: value for name, value in shown.items() if not (name == "codec" and value == Exact())}
