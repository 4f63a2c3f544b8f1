"""Named methods: functions that return plans, and the text form of plans.

`ddp()`, `alone()`, `power_sgd(rank=4)`, `post_local_sgd(period=16)`, `diloco(period=100)` and so on. `plan(text)`
parses the text that a plan prints as.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import signature
from typing import Literal, TypeAlias

from laconic.codecs import Batched, ByName, ByShape, Cast, Codec, ErrorFeedback, Exact, LowRank, Quantized, Sign, TopK
from laconic.plans.nested import Nested
from laconic.plans.outer import Adopt, Nesterov, Optim
from laconic.plans.parse import PlanError, parse
from laconic.plans.plan import Buffers, OptimizerState, Plan
from laconic.plans.schedules import Every, Never, PostLocal, Quadratic, Schedule, Streaming
from laconic.plans.topology import Groups, Topology, World
from laconic.values import call


def ddp() -> Plan:
    """Average gradients exactly at every step, as DDP does."""
    return Plan()


def alone() -> Plan:
    """Never synchronise: after the handshake of `attach` nothing is sent, and each worker trains a model of its own.

    The baseline: a plan that ends with no lower loss than this has sent its bytes for nothing.
    """
    return Plan(Never())


def power_sgd(
    rank: int = 32,
    bits: int | None = 4,
    start: int = 1,
    min_compression: float = 2,
    rounds: Literal["two", "alternating"] = "two",
    feedback: bool = True,
    warm_start: bool = True,
    seed: int = 0,
) -> Plan:
    """Average gradients at every step, each matrix as two thin factors (PowerSGD, arXiv:1905.13727).

    Factors, vectors and small tensors travel in `bits` bits a number; None sends all bits. Steps before `start` average
    exactly. `rounds="alternating"` sends one factor a step: half the bytes, and far more than half of the loss is lost.

    >>> power_sgd(rank=1, bits=None).codec
    ByShape(codec=ErrorFeedback(codec=LowRank(rank=1)))
    """
    if not isinstance(feedback, bool):
        raise ValueError(f"power_sgd(feedback={feedback!r}): feedback must be True or False.")
    codec: Codec = LowRank(rank, min_compression, rounds, warm_start, seed, bits)
    rest: Codec = Exact() if bits is None else Quantized(bits)
    if feedback:
        codec, rest = ErrorFeedback(codec), rest if bits is None else ErrorFeedback(rest)
    return Plan(Every(1, start), ByShape(codec, rest))


Group: TypeAlias = int | Literal["machine"] | None


def post_local_sgd(
    start: int = 1,
    period: int = 16,
    group: Group = None,
    buffers: Buffers = "average",
    optimizer_state: OptimizerState = "keep",
) -> Plan:
    """Average gradients at every step before `start`, then weights every `period` steps (arXiv:1808.07217).

    With `group`, groups of that many workers, or the workers of one "machine", keep averaging gradients at every step.
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
    """Average weight deltas every `period` steps and apply them with Nesterov momentum (DiLoCo, arXiv:2311.08105)."""
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
    """DiLoCo in fragments that synchronise at different steps and overlap with training (arXiv:2501.18512)."""
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
    """Average weights every (growth / lr)² steps: less often as the learning rate falls (arXiv:2310.14423)."""
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
    """Return a function from a plan to its method's arguments, for a kind of schedule, with or without outer step."""

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
    "alone": (alone, _no_arguments),
    "power_sgd": (power_sgd, _power_sgd_arguments),
    "post_local_sgd": (post_local_sgd, _local_arguments(PostLocal, outer=False)),
    "hierarchical_sgd": (hierarchical_sgd, _local_arguments(Nested, outer=False)),
    "diloco": (diloco, _local_arguments(PostLocal, outer=True)),
    "streaming_diloco": (streaming_diloco, _local_arguments(Streaming, outer=True)),
    "qsr": (qsr, _local_arguments(Quadratic, outer=False)),
}
"""The named methods, each with a function that returns the arguments for a given plan, or None."""

_VOCABULARY: dict[str, Callable[..., object]] = {
    **{name: method for name, (method, _) in _METHODS.items()},
    **{kind.__name__: kind for kind in (Plan, Every, Never, PostLocal, Nested, Quadratic, Streaming)},
    **{kind.__name__: kind for kind in (Adopt, Nesterov, Optim, World, Groups)},
    **{kind.__name__: kind for kind in (Exact, Cast, LowRank, Quantized, TopK, Sign)},
    **{kind.__name__: kind for kind in (ErrorFeedback, ByShape, ByName, Batched)},
}
_ALWAYS_SHOWN = ("rank", "period", "fragments")


def call_of(plan: Plan) -> str | None:
    """Return the call of the named method that makes `plan`, or None."""
    for name, (method, arguments) in _METHODS.items():
        given = arguments(plan)
        if given is not None and method(**given) == plan:
            return call(name, _shown(method, given))
    return None


def _shown(method: Callable[..., Plan], given: dict[str, object]) -> dict[str, object]:
    """Return the arguments to print: those that differ from their defaults, and always rank, period and fragments."""
    parameters = signature(method).parameters.values()
    shown = {p.name: given[p.name] for p in parameters if given[p.name] != p.default or p.name in _ALWAYS_SHOWN}
    return {name: value for name, value in shown.items() if not (name == "codec" and value == Exact())}


def plan(text: str) -> Plan:
    """Parse a plan from its text; nothing is evaluated.

    >>> plan("power_sgd(rank=2)") == power_sgd(rank=2)
    True
    >>> plan("power_sdg(rank=2)")
    Traceback (most recent call last):
    laconic.plans.parse.PlanError: 'power_sdg(rank=2)': there is no 'power_sdg'. Did you mean power_sgd?
    """
    value = parse(text, _VOCABULARY)
    if not isinstance(value, Plan):
        raise PlanError(
            f"{text!r} is a {type(value).__name__}, which can only be a part of a plan. "
            "Write a method such as power_sgd(rank=4), or Plan(schedule=..., codec=...)."
        )
    return value


def plan_from_env(default: Plan | None = None) -> Plan:
    """Return the plan that `laconic compare --script` sets in LACONIC_PLAN, else `default`, else `ddp()`.

    >>> plan_from_env(default=power_sgd(rank=2))
    power_sgd(rank=2)
    """
    text = os.environ.get("LACONIC_PLAN")
    if text is None:
        return ddp() if default is None else default
    return plan(text)
