"""In which order a script makes gradients, clears them and averages weights."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Literal

Event = Literal["backward", "zero_grad", "average"]
_METHODS: dict[str, Event] = {
    "backward": "backward",
    "zero_grad": "zero_grad",
    "average_parameters": "average",
}


class GradientEvents:
    """The calls of `backward`, `zero_grad` and `average_parameters`, by the blocks that they are in."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree

    @property
    def has_average(self) -> bool:
        """Whether the script calls `average_parameters` of anything."""
        return any(event == "average" for event, _ in _events(self.tree))

    def averages_without_gradients(self) -> list[ast.Call]:
        """The averages that come after a `zero_grad` with no `backward` between, in a block or around a loop."""
        found: dict[int, ast.Call] = {}
        for block, is_loop in _blocks(self.tree):
            events = [event for statement in block for event in _events(statement)]
            last = _last_gradient_event(events) if is_loop else None
            for event, call in events:
                if event == "average" and last == "zero_grad":
                    found[id(call)] = call
                elif event != "average":
                    last = event
        return list(found.values())


def _last_gradient_event(events: list[tuple[Event, ast.Call]]) -> Event | None:
    """What a loop's next turn begins with."""
    return next((event for event, _ in reversed(events) if event != "average"), None)


def _blocks(tree: ast.Module) -> Iterator[tuple[list[ast.stmt], bool]]:
    """The bodies of the script, its functions and its loops; loops go round."""
    yield tree.body, False
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.body, False
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
            yield node.body, True


def _events(node: ast.AST) -> Iterator[tuple[Event, ast.Call]]:
    """Calls in the order of the text; what a function defined inside does is its own block's matter."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return
    for child in ast.iter_child_nodes(node):
        yield from _events(child)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        event = _METHODS.get(node.func.attr)
        if event and not (event == "zero_grad" and _keeps_zeros(node)):
            yield event, node


def _keeps_zeros(call: ast.Call) -> bool:
    """`zero_grad(set_to_none=False)` leaves gradients that are zero, which torch averages with."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "set_to_none"] + call.args[:1]
    return bool(given) and isinstance(given[0], ast.Constant) and given[0].value is False
