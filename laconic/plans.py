"""Plans: the whole choice in one value.

    Plan(schedule=Every(1), codec=ByShape(ErrorFeedback(LowRank(rank=4))), outer=Adopt())

and names for the methods that people know: `ddp()`, `power_sgd(rank=4)`, `post_local_sgd(period=16)`. A plan is
frozen, compares and hashes, prints as the code that makes it, and parses back from that text (`plan`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from inspect import signature
from typing import Literal

from laconic.codecs import Batched, ByShape, Cast, Codec, ErrorFeedback, Exact, LowRank
from laconic.outer import Adopt, Outer
from laconic.schedules import Every, Payload, PostLocal, Schedule
from laconic.text import PlanError, as_code, call, parse


@dataclass(frozen=True, repr=False)
class Plan:
    """When workers talk, how it is said, and what is done with what was heard.

    >>> Plan(codec=ByShape(ErrorFeedback(LowRank(rank=2, rounds="alternating")))) == power_sgd(rank=2)
    True
    >>> power_sgd(rank=2)
    power_sgd(rank=2)
    """

    schedule: Schedule = field(default_factory=Every)
    codec: Codec = field(default_factory=Exact)
    outer: Outer = field(default_factory=Adopt)

    def __post_init__(self) -> None:
        wanted = {"schedule": (Schedule, "Every(8)"), "codec": (Codec, "Exact()"), "outer": (Outer, "Adopt()")}
        for part, (kind, example) in wanted.items():
            value = getattr(self, part)
            if not isinstance(value, kind) or isinstance(value, type):
                raise TypeError(f"Plan({part}={value!r}): {part} must be a {part}, such as {example}.")

    def at(self, step: int) -> tuple[Payload, Codec] | None:
        """Tell what is averaged at `step` and through which codec, or None for a step of silence."""
        payload = self.schedule.at(step)
        if payload is None:
            return None
        if step < self.schedule.start:
            return payload, Exact()
        return payload, self.codec

    @property
    def local(self) -> bool:
        """Whether there are steps after which workers hold different weights."""
        return self.schedule.at(self.schedule.start) is not Payload.GRADIENT

    @property
    def needs_anchor(self) -> bool:
        """Whether rounds exchange deltas from an anchor, and do not just average the weights themselves."""
        return self.local and not (self.outer.adopts and isinstance(self.codec, Exact))

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


def post_local_sgd(start: int = 1, period: int = 16) -> Plan:
    """Average gradients at every step before `start`, then weights every `period` steps (arXiv:1808.07217)."""
    return Plan(PostLocal(start, period))


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


def _post_local_arguments(plan: Plan) -> dict[str, object] | None:
    return {"start": plan.schedule.start, "period": plan.schedule.period}


_METHODS: dict[str, tuple[Callable[..., Plan], Callable[[Plan], dict[str, object] | None]]] = {
    "ddp": (ddp, _no_arguments),
    "power_sgd": (power_sgd, _power_sgd_arguments),
    "post_local_sgd": (post_local_sgd, _post_local_arguments),
}
"""The named methods, each with the arguments that would make a given plan, if any could."""


_VOCABULARY: dict[str, Callable[..., object]] = {
    **{name: method for name, (method, _) in _METHODS.items()},
    **{kind.__name__: kind for kind in (Plan, Every, PostLocal, Adopt)},
    **{kind.__name__: kind for kind in (Exact, Cast, LowRank, ErrorFeedback, ByShape, Batched)},
}
_ALWAYS_SHOWN = ("rank", "period")


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
    return {p.name: given[p.name] for p in parameters if given[p.name] != p.default or p.name in _ALWAYS_SHOWN}
