"""Known misuses of torch's hooks and averagers that a script shows.

The rules follow names through plain assignments and no further, so they can miss a misuse that is spread over files.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import libcst as cst

from laconic.migrate.script import Finding, Parsed, dotted, source

AVERAGERS = ("PeriodicModelAverager", "HierarchicalModelAverager")
OPTIMIZER = "PostLocalSGDOptimizer"
_ADVICE = {
    "averaging after zero_grad": (
        "torch's averagers take only parameters whose gradient is not None on this worker, and zero_grad() has set it "
        "to None: nothing is averaged, or torch.cat raises",
        "Average between optimizer.step() and zero_grad(); laconic's averagers do not look at gradients.",
    ),
    "warm-up mismatch": (
        "warmup_steps is {} here and start_localSGD_iter is {} in PostLocalSGDState (line {}): between the two, "
        "workers average neither gradients nor weights, or average both",
        "Give both the same name or number; laconic.post_local_sgd(start=...) has one place for it.",
    ),
    "hook state of worker 0 only": (
        "each worker has a residual and counters of its own in this state; one worker's, loaded on all, applies its "
        "residual once for each worker (measured: a loss of 28.7 instead of 3.1)",
        "Save on every worker, each to its own file; the twin's state has state_dict() for it.",
    ),
    "GradScaler with averaging optimizer": (
        "GradScaler skips the whole step on a worker whose gradients overflowed, and the averaging in it: the workers' "
        "counters differ from then on, and each waits for the others without end (pytorch#76282)",
        "Take PostLocalSGDOptimizer from laconic.algorithms.optim, which also averages in steps that GradScaler skips.",
    ),
    "GradScaler with averaging": (
        "GradScaler decides on each worker by itself: when workers do not average gradients, one skips a step that the "
        "others take, and their scales become different",
        "Use bfloat16, which needs no GradScaler; or wrap the optimizer in laconic's PostLocalSGDOptimizer.",
    ),
}


def misuses(script: Parsed, is_migrated: bool) -> Iterator[Finding]:
    """Yield what all rules find. A script that `is_migrated` has laconic's names, for which two rules do not apply."""
    if not is_migrated:  # laconic averages parameters with and without gradients
        yield from _averaging_after_zero_grad(script)
    yield from _different_warm_up(script)
    yield from _state_saved_by_worker_0_only(script)
    yield from _scaler_with_averaging(script, is_migrated)


def _misuse(script: Parsed, call: cst.Call, rule: str, *values: object) -> Finding:
    why, way_out = _ADVICE[rule]
    return script.finding(call, "misuse", rule.removesuffix(" optimizer"), why.format(*values), way_out)


def _name(node: Any) -> str:
    """The last name of an expression, or of what it calls: `c` of `a.b.c` and of `a().c(x)`."""
    node = node.func if isinstance(node, cst.Call) else node
    node = node.attr if isinstance(node, cst.Attribute) else node
    return node.value if isinstance(node, cst.Name) else ""


def _called(script: Parsed, *names: str) -> list[cst.Call]:
    return [call for call in script.calls if _name(call) in names]


def _averaging_after_zero_grad(script: Parsed) -> Iterator[Finding]:
    """In a function or a loop, an average that comes after `zero_grad` with no `backward` between."""
    blocks = defaultdict(list)
    for call in _called(script, "backward", "zero_grad", "average_parameters"):
        keeps_zeros = _name(call) == "zero_grad" and any(dotted(arg.value) == "False" for arg in call.args)
        for block in _blocks(script, call) if isinstance(call.func, cst.Attribute) and not keeps_zeros else ():
            blocks[block].append(call)
    for block, calls in blocks.items():
        on_gradients = [_name(call) for call in calls if _name(call) != "average_parameters"]
        last = on_gradients[-1] if on_gradients and isinstance(block, cst.For | cst.While) else ""
        for call in calls:
            if _name(call) != "average_parameters":
                last = _name(call)
            elif last == "zero_grad" and call.func not in script.uses:  # not torch's function, which takes all of them
                yield _misuse(script, call, "averaging after zero_grad")


def _blocks(script: Parsed, node: Any) -> Iterator[Any]:
    """The loops around a node, and the function or script that they are in."""
    ends = cst.Module | cst.FunctionDef | cst.ClassDef | cst.Lambda
    while not isinstance(node, ends):
        node = script.parents[node]
        if isinstance(node, ends | cst.For | cst.While):
            yield node


def _different_warm_up(script: Parsed) -> Iterator[Finding]:
    states = _called(script, "PostLocalSGDState")
    starts = [_setting(script, call, "start_localSGD_iter", 2) for call in states]
    for call in _called(script, *AVERAGERS):
        warm_up = _setting(script, call, "warmup_steps", 1, default="0")
        if states and None not in (warm_up, *starts) and warm_up not in starts:
            known, line = sorted({f"{start}" for start in starts}), script.positions[states[0]].start.line
            yield _misuse(script, call, "warm-up mismatch", warm_up, " or ".join(known), line)


def _setting(script: Parsed, call: cst.Call, keyword: str, position: int, default: str | None = None) -> str | None:
    """The value of an argument as text, or the number that it is assigned; `None` if the call does not show it."""
    if any(arg.star for arg in call.args):
        return None
    positional = [arg for arg in call.args if not arg.keyword][position : position + 1]
    given = positional + [arg for arg in call.args if arg.keyword and arg.keyword.value == keyword]
    if not given:
        return default
    values = [value for name, value in script.values if name == dotted(given[0].value)]
    value = values[0] if len(values) == 1 else given[0].value
    return str(value.evaluated_value) if isinstance(value, cst.Integer | cst.Float) else source(given[0].value)


def _holders(script: Parsed, *classes: str) -> set[str]:
    """The names to which an object of one of these classes, or a container of one, is assigned."""
    names = {name for name, value in script.values if isinstance(value, cst.Call) and _name(value) in classes}
    while more := {name for name, value in script.values if _holds(value, names)} - names:
        names |= more
    return names


def _holds(value: Any, names: set[str]) -> bool:
    """Whether a value is, or contains, what one of the names stands for."""
    if isinstance(value, cst.Dict | cst.List | cst.Tuple | cst.Set):
        return any(_holds(element.value, names) for element in value.elements)
    if isinstance(value, cst.Call) and _name(value) in ("state_dict", "__getstate__"):
        return isinstance(value.func, cst.Attribute) and _holds(value.func.value, names)
    if isinstance(value, cst.Call) and _name(value) in ("dict", "list", "dumps", "deepcopy", "copy", "vars"):
        return any(_holds(arg.value, names) for arg in value.args)
    return dotted(value) in names


def _state_saved_by_worker_0_only(script: Parsed) -> Iterator[Finding]:
    states = _holders(script, "PowerSGDState", "PostLocalSGDState")
    for call in script.calls:
        is_save = re.search("save|dump", _name(call), re.IGNORECASE)
        if is_save and any(_holds(arg.value, states) for arg in call.args) and _runs_on_worker_0_only(script, call):
            yield _misuse(script, call, "hook state of worker 0 only")


def _runs_on_worker_0_only(script: Parsed, node: Any) -> bool:
    """Whether a node is in a branch for rank 0, or after `if rank != 0: return`."""
    while (parent := script.parents.get(node)) is not None:
        if isinstance(parent, cst.If) and node in (parent.body, parent.orelse):
            if _selects(source(parent.test), worker_0=node is parent.body):
                return True
        elif isinstance(parent, cst.IndentedBlock | cst.Module):
            earlier = [each for each in parent.body[: parent.body.index(node)] if isinstance(each, cst.If)]
            if any(_selects(source(each.test), worker_0=False) and _leaves(each.body) for each in earlier):
                return True
        node = parent
    return False


_RANK = r"(?!\S*\bis_)[\w.]*rank\w*(\([^()]*\))?"
_MAIN = r"[\w.]*is_(main|master|rank_zero|chief)\w*(\([^()]*\))?"


def _selects(test: str, worker_0: bool) -> bool:
    """Whether a condition is true on worker 0 only, or else on the other workers only."""
    if worker_0 and " and " in test and not test.startswith("not ("):
        return any(_selects(part, worker_0) for part in test.split(" and "))
    if test.startswith("not "):
        rest = test.removeprefix("not ")
        return worker_0 if re.fullmatch(_RANK, rest, re.IGNORECASE) else _selects(rest, not worker_0)
    comparison = "{0} == 0|0 == {0}|{1}" if worker_0 else "{0} != 0|0 != {0}"
    return re.fullmatch(comparison.format(_RANK, _MAIN), test, re.IGNORECASE) is not None


def _leaves(block: Any) -> bool:
    last = block.body[-1]
    last = last.body[-1] if isinstance(last, cst.SimpleStatementLine) else last
    return isinstance(last, cst.Return | cst.Continue | cst.Raise)


def _scaler_with_averaging(script: Parsed, is_migrated: bool) -> Iterator[Finding]:
    scalers, optimizers = _holders(script, "GradScaler"), _holders(script, OPTIMIZER)
    averages = _called(script, *AVERAGERS, OPTIMIZER, "average_parameters")
    for call in _called(script, "step") if averages else ():
        if not isinstance(call.func, cst.Attribute) or not _holds(call.func.value, scalers) or not call.args:
            continue
        if not _holds(call.args[0].value, optimizers):
            yield _misuse(script, call, "GradScaler with averaging")
        elif not is_migrated:  # laconic's optimizer averages also where GradScaler skips the update
            yield _misuse(script, call, "GradScaler with averaging optimizer")
