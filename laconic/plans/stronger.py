"""The next stronger plan: one that sends more and loses less, for the guard to go on with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from laconic.codecs import Codec, Exact
from laconic.plans.plan import Plan
from laconic.plans.schedules import Every

MOST_RANK = 64
MOST_FRACTION = 0.25
MOST_BITS = 8


def stronger(plan: Plan) -> Plan | None:
    """Return a plan that sends about twice as much, or None if there is nothing stronger.

    First the codec gets more bits or rank, then it is exact, then the period is halved.

    >>> from laconic import power_sgd
    >>> stronger(power_sgd(rank=1, bits=2))
    power_sgd(rank=1, bits=4)
    >>> stronger(power_sgd(rank=1))
    power_sgd(rank=2, bits=4)
    >>> stronger(power_sgd(rank=64, bits=8))
    ddp()
    """
    if not isinstance(plan.codec, Exact):
        return replace(plan, codec=_stronger_codec(plan.codec) or Exact())
    return _half_period(plan)


def strengths(plan: Plan) -> Iterator[Plan]:
    """Yield ever stronger plans."""
    found = stronger(plan)
    while found is not None:
        yield found
        found = stronger(found)


def _stronger_codec(codec: Any) -> Codec | None:
    """Return the codec with every part of it one strength up; None if no part has one."""
    for argument in _own_strengths(codec):
        try:
            raised: Codec = replace(codec, **argument)
            return raised
        except ValueError:  # bits that this codec does not have
            continue
    change: dict[str, Any] = {}
    if is_dataclass(codec):
        values = {f.name: getattr(codec, f.name) for f in fields(codec)}
        change = {name: found for name, value in values.items() if (found := _stronger_part(value)) is not None}
        if {"codec", "rest"} <= change.keys() and _bits(change["codec"]) == _bits(values["codec"]):
            del change["rest"]  # small tensors get more bits only with the others
    return replace(codec, **change) if change else None


def _own_strengths(codec: Any) -> Iterator[dict[str, Any]]:
    """Yield arguments that make a codec stronger, the best first."""
    bits = getattr(codec, "bits", None)
    if getattr(codec, "rounds", None) == "alternating":
        yield {"rounds": "two"}
    if bits is not None and bits < 4:
        yield {"bits": 2 * bits}
    if getattr(codec, "rank", MOST_RANK) < MOST_RANK:
        yield {"rank": 2 * codec.rank}
    if getattr(codec, "fraction", MOST_FRACTION) < MOST_FRACTION:
        yield {"fraction": min(MOST_FRACTION, 2 * codec.fraction)}
    if bits is not None and 4 <= bits < MOST_BITS:
        yield {"bits": 2 * bits}


def _bits(codec: object) -> object:
    """Return the bits of a codec, or of the codec that it wraps."""
    return getattr(codec, "bits", None) if not hasattr(codec, "codec") else _bits(codec.codec)


def _stronger_part(value: object) -> Any:
    if isinstance(value, Mapping):
        found = {key: _stronger_part(each) for key, each in value.items()}
        raised = any(each is not None for each in found.values())
        return {key: each or value[key] for key, each in found.items()} if raised else None
    return _stronger_codec(value) if isinstance(value, Codec) else None


def _half_period(plan: Plan) -> Plan | None:
    """Return the plan with half its period, where its schedule has one and can be that short."""
    schedule: Any = plan.schedule
    periods = [f.name for f in fields(schedule) if f.name in ("period", "floor")]
    period = getattr(schedule, periods[0]) if periods else 1
    if period < 2:
        return None
    changed = {periods[0]: period // 2} | ({"of": "weights"} if isinstance(schedule, Every) else {})
    try:
        return replace(plan, schedule=replace(schedule, **changed))
    except ValueError:  # such as a period below the number of fragments
        return None
