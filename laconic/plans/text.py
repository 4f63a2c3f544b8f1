"""The text of plans: the call that a plan prints as, and the plan that such a text describes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from inspect import signature

from laconic.codecs import ByName, ByShape, Cast, ErrorFeedback, Exact, LowRank, Quantized, TopK
from laconic.plans.auto import auto
from laconic.plans.methods import (
    alone,
    ddp,
    diloco,
    few_bit_deltas,
    frugal,
    hierarchical_sgd,
    post_local_sgd,
    power_sgd,
    qsr,
    quantized_ddp,
    sparse_loco,
    streaming_diloco,
)
from laconic.plans.nested import Nested
from laconic.plans.outer import Adopt, Nesterov, Optim
from laconic.plans.parse import PlanError, parse
from laconic.plans.plan import Plan
from laconic.plans.schedules import Every, Never, PostLocal, Quadratic, Schedule, Streaming
from laconic.plans.topology import Groups, World
from laconic.values import call


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


def _quantized_arguments(plan: Plan) -> dict[str, object] | None:
    codec = plan.codec.codec if isinstance(plan.codec, ErrorFeedback) else None
    if not isinstance(codec, Quantized):
        return None
    return {"bits": codec.bits, "block": codec.block, "start": plan.schedule.start}


def _sparse_arguments(plan: Plan) -> dict[str, object] | None:
    feedback = plan.codec.codec if isinstance(plan.codec, ByShape) else None
    if not isinstance(feedback, ErrorFeedback) or not isinstance(feedback.codec, TopK):
        return None
    if not isinstance(plan.outer, Nesterov):
        return None
    given = {"period": plan.schedule.period, "start": plan.schedule.start, "lr": plan.outer.lr}
    return given | {"fraction": feedback.codec.fraction, "decay": feedback.decay} | _local_options(plan)


def _frugal_arguments(plan: Plan) -> dict[str, object] | None:
    codec = plan.codec.codec if isinstance(plan.codec, ErrorFeedback) else None
    if not isinstance(plan.schedule, Streaming) or not isinstance(codec, Quantized):
        return None
    each = 31 if codec.bits == 1 else 15
    return {"bytes": f"{each * plan.schedule.period}x", "start": plan.schedule.start, "delay": plan.schedule.delay}


def _local_options(plan: Plan) -> dict[str, object]:
    return {"buffers": plan.buffers, "optimizer_state": plan.optimizer_state}


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
        return given | _local_options(plan)

    return arguments


_METHODS: dict[str, tuple[Callable[..., Plan], Callable[[Plan], dict[str, object] | None]]] = {
    "ddp": (ddp, _no_arguments),
    "alone": (alone, _no_arguments),
    "power_sgd": (power_sgd, _power_sgd_arguments),
    "quantized_ddp": (quantized_ddp, _quantized_arguments),
    "frugal": (frugal, _frugal_arguments),
    "sparse_loco": (sparse_loco, _sparse_arguments),
    "post_local_sgd": (post_local_sgd, _local_arguments(PostLocal, outer=False)),
    "hierarchical_sgd": (hierarchical_sgd, _local_arguments(Nested, outer=False)),
    "diloco": (diloco, _local_arguments(PostLocal, outer=True)),
    "streaming_diloco": (streaming_diloco, _local_arguments(Streaming, outer=True)),
    "qsr": (qsr, _local_arguments(Quadratic, outer=False)),
}
"""The named methods, each with a function that returns the arguments for a given plan, or None."""

_VOCABULARY: dict[str, Callable[..., object]] = {
    "auto": auto,
    **{name: method for name, (method, _) in _METHODS.items()},
    **{kind.__name__: kind for kind in (Plan, Every, Never, PostLocal, Nested, Quadratic, Streaming)},
    **{kind.__name__: kind for kind in (Adopt, Nesterov, Optim, World, Groups)},
    **{kind.__name__: kind for kind in (Exact, Cast, LowRank, Quantized, TopK)},
    **{kind.__name__: kind for kind in (ErrorFeedback, ByShape, ByName)},
}
_ALWAYS_SHOWN = ("rank", "bits", "period", "fragments", "bytes")


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
    return {name: value for name, value in shown.items() if not (name == "codec" and value == few_bit_deltas())}


def plan(text: str) -> Plan:
    """Parse a plan from its text; nothing is evaluated. "auto" is `auto()`, which measures and chooses one.

    >>> plan("power_sgd(rank=2)") == power_sgd(rank=2)
    True
    >>> plan("power_sdg(rank=2)")
    Traceback (most recent call last):
    laconic.plans.parse.PlanError: 'power_sdg(rank=2)': there is no 'power_sdg'. Did you mean power_sgd?
    """
    value = auto() if text.strip() == "auto" else parse(text, _VOCABULARY)
    if not isinstance(value, Plan):
        raise PlanError(
            f"{text!r} is a {type(value).__name__}, which can only be a part of a plan. "
            "Write a method such as power_sgd(rank=4), or Plan(schedule=..., codec=...)."
        )
    return value


def plan_from_env(default: Plan | None = None) -> Plan:
    """Return the plan that `laconic compare --script` sets in LACONIC_PLAN, else `default`, else `ddp()`.

    >>> plan_from_env(default=power_sgd(rank=2))
    power_sgd(rank=2, bits=4)
    """
    text = os.environ.get("LACONIC_PLAN")
    if text is None:
        return ddp() if default is None else default
    return plan(text)
