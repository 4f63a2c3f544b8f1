"""`optimizer.step(closure)`: the closure computes the gradients inside the step, as under Lightning.

So the session runs inside it, when it is about to return. torch's optimizers call a closure first, and read gradients
only then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def run_when_ready(args: tuple[Any, ...], kwargs: dict[str, Any], ready: Callable[[int], None]) -> Arguments | None:
    """Call `ready` with 1 as soon as the gradients of a step are there: now, or at the end of its closure.

    `args` and `kwargs` are those of the step, the optimizer first. Return the new ones if they contain a closure. An
    optimizer that calls it again has computed the gradients anew: then `ready` is called with 2, 3, ...
    """
    closure = kwargs.get("closure") if len(args) < 2 else args[1]
    if closure is None:
        ready(1)
        return None
    calls = 0

    def evaluate() -> Any:
        nonlocal calls
        loss = closure()
        calls += 1
        ready(calls)
        return loss

    return ((args[0], evaluate, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": evaluate})
