"""Parse plans from text, without evaluating anything."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any


class PlanError(ValueError):
    """The text is not a plan. The message quotes the text, gives the rule, and says what to write instead."""


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
        part = ast.unparse(node)
        raise PlanError(
            f"{text!r}: cannot read {part!r}. A plan consists of calls, numbers and quoted strings, "
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
    try:
        bound = signature(function).bind(*arguments, **keywords)
    except TypeError as error:
        raise PlanError(f"{text!r}: {name}: {error}. It is {name}({_parameters(function)}).") from None
    try:
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
