"""The text of plans: the call that a plan prints as, and the plan that such a text describes."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

from laconic.codecs import ByName, ByShape, Cast, ErrorFeedback, Exact, LowRank, Quantized, TopDCT, TopK
from laconic.errors import PlanError
from laconic.plans import methods
from laconic.plans.outer import Nesterov, Optim
from laconic.plans.plan import Plan
from laconic.plans.schedules import Every, Nested, Never, Quadratic, Streaming, Timed
from laconic.plans.topology import Groups, World
from laconic.values import call

_METHODS: dict[str, Callable[..., Plan]] = {
    method.__name__: method
    for method in (
        *(methods.ddp, methods.alone, methods.power_sgd, methods.quantized_ddp, methods.demo, methods.sparse_loco),
        *(methods.post_local_sgd, methods.hierarchical_sgd, methods.diloco, methods.streaming_diloco, methods.qsr),
    )
}
"""The named methods that a plan may print as. Of several that make the same one, it prints as the first."""
_VOCABULARY: dict[str, Callable[..., object]] = {
    **_METHODS,
    "frugal": methods.frugal,
    **{kind.__name__: kind for kind in (Plan, Every, Never, Nested, Quadratic, Streaming, Timed)},
    **{kind.__name__: kind for kind in (Nesterov, Optim, World, Groups)},
    **{kind.__name__: kind for kind in (Exact, Cast, LowRank, Quantized, TopDCT, TopK)},
    **{kind.__name__: kind for kind in (ErrorFeedback, ByShape, ByName)},
}
"""What a text may call."""
_ALWAYS_SHOWN = ("rank", "bits", "period", "fragments")


def call_of(plan: Plan) -> str | None:
    """Return the call of the named method that makes `plan`, or None.

    >>> call_of(Plan(Every(16)))
    'post_local_sgd(period=16)'
    """
    known = _arguments(plan)
    for name, method in _METHODS.items():  # a method made the plan if it makes an equal one of these arguments
        parameters = signature(method).parameters.values()
        if all(p.name in known for p in parameters):
            given = {p.name: known[p.name] for p in parameters}
            try:
                made = method(**given)
            except (TypeError, ValueError):  # these values mean something else in this method
                continue
            if made == plan:
                always = {name for name in _ALWAYS_SHOWN if given.get(name) is not None}
                shown = {p.name for p in parameters if given[p.name] != p.default} | always
                if given.get("codec") == methods.few_bit_deltas():
                    shown.discard("codec")
                return call(name, {key: value for key, value in given.items() if key in shown})
    return None


def _arguments(plan: Plan) -> dict[str, Any]:
    """Return what each argument of the named methods would be if one of them had made `plan`."""
    found: dict[str, Any] = {}
    codecs = [plan.codec, *_inside(plan.codec)]
    for value in (*codecs, plan.outer, plan.schedule):
        if is_dataclass(value):
            found |= {f.name: getattr(value, f.name) for f in fields(value)}
    found["every"] = None
    if isinstance(plan.schedule, Timed):
        found |= {"every": plan.schedule.every, "period": None}
    found["feedback"] = any(isinstance(codec, ErrorFeedback) for codec in codecs)
    return found | {
        "bytes": None,  # a plan that is known needs no target
        "dtype": found.get("to"),
        "codec": plan.codec,
        "group": plan.topology.inner,
        "buffers": plan.buffers,
        "optimizer_state": plan.optimizer_state,
    }


def _inside(codec: Any) -> Iterator[Any]:
    """Yield the codec that a codec wraps, and the codec that this one wraps, and so on."""
    while codec := getattr(codec, "codec", None):
        yield codec


def register(method: Callable[[], Plan]) -> None:
    """Let the texts of plans call a method of a tool."""
    _VOCABULARY[method.__name__] = method


def plan(text: str) -> Plan:
    """Parse a plan from its text; nothing is evaluated. "auto" is `auto()`, which measures and chooses one.

    >>> plan("power_sgd(rank=2)") == methods.power_sgd(rank=2)
    True
    >>> plan("power_sdg(rank=2)")
    Traceback (most recent call last):
    laconic.errors.PlanError: 'power_sdg(rank=2)': there is no 'power_sdg'. Did you mean power_sgd?
    """
    value = parse("auto()" if text.strip() == "auto" else text, _VOCABULARY)
    if not isinstance(value, Plan):
        raise PlanError(
            f"{text!r} is a {type(value).__name__}, which can only be a part of a plan. "
            "Write a method such as power_sgd(rank=4), or Plan(schedule=..., codec=...)."
        )
    return value


def plan_from_env(default: Plan | None = None) -> Plan:
    """Return the plan that `laconic compare --script` sets in LACONIC_PLAN, else `default`, else `ddp()`.

    >>> plan_from_env(default=methods.power_sgd(rank=2))
    power_sgd(rank=2, bits=4)
    """
    text = os.environ.get("LACONIC_PLAN")
    if text is None:
        return methods.ddp() if default is None else default
    return plan(text)


def parse(text: Any, names: Mapping[str, Callable[..., Any]]) -> Any:
    """Build the value that `text` describes: calls of `names` with constants, dicts and further calls as arguments.

    Everything else is refused, and nothing is evaluated.
    """
    if not isinstance(text, str):
        raise PlanError(f"{text!r} is not text. A plan is written as a call, such as {_example(names)}.")
    try:
        return _build(ast.parse(text.strip(), mode="eval").body, text, names)
    except PlanError:
        raise
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = getattr(error, "msg", None) or "too deep"
        if reason.endswith("l literal"):  # Python calls 120x an invalid decimal literal
            reason = 'what begins with a digit and is no number needs quotes, as in frugal("120x")'
        raise PlanError(f"{text!r} is not a plan: {reason}. Write a call, such as {_example(names)}.") from None


def _build(node: ast.expr, text: str, names: Mapping[str, Callable[..., Any]]) -> Any:
    if isinstance(node, ast.Call):
        return _build_call(node, text, names)
    if isinstance(node, ast.Name) and node.id in names:
        raise PlanError(f"{text!r}: {node.id} must be a call. Write {node.id}().")
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        keys = [_build(key, text, names) for key in node.keys if key is not None]
        try:
            return dict(zip(keys, [_build(value, text, names) for value in node.values], strict=True))
        except TypeError:
            raise PlanError(f"{text!r}: the keys of a dict must be numbers or quoted strings.") from None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        unread = ast.unparse(node)
        raise PlanError(
            f"{text!r}: cannot read {unread!r}. A plan consists of calls, numbers and quoted strings, "
            f"such as {_example(names)}."
        ) from None


def _build_call(node: ast.Call, text: str, names: Mapping[str, Callable[..., Any]]) -> Any:
    name = ast.unparse(node.func).removeprefix("laconic.")
    if name not in names:
        close = get_close_matches(name, names, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(sorted(names))}."
        raise PlanError(f"{text!r}: there is no {name!r}. {hint}")
    function = names[name]
    keywords = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise PlanError(f"{text!r}: ** is not supported. Write each argument by its name.")
        if keyword.arg in keywords:
            raise PlanError(f"{text!r}: {keyword.arg} is given twice. Write each argument once.")
        keywords[keyword.arg] = _build(keyword.value, text, names)
    arguments = [_build(argument, text, names) for argument in node.args]
    try:  # wrong names and numbers of arguments
        bound = signature(function).bind(*arguments, **keywords)
    except TypeError as error:
        raise PlanError(f"{text!r}: {name}: {error}. It is {name}({_parameters(function)}).") from None
    try:  # wrong values
        return function(*bound.args, **bound.kwargs)
    except PlanError:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        raise PlanError(f"{text!r}: {error}") from error


def _parameters(function: Callable[..., Any]) -> str:
    parts = []
    for parameter in signature(function).parameters.values():
        shown = parameter.default is Parameter.empty or "factory" in repr(parameter.default)
        parts.append(parameter.name if shown else f"{parameter.name}={parameter.default!r}")
    return ", ".join(parts)


def _example(names: Mapping[str, Callable[..., Any]]) -> str:
    return "power_sgd(rank=4)" if "power_sgd" in names else f"{next(iter(names))}()"
