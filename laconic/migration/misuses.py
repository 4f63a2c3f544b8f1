"""Known misuses of torch's hooks and averagers that can be seen in a script's text.

Four rules, each a function from a script to findings. They follow names through plain assignments and no further, so
they can miss a misuse that is spread over files; what they report is quoted with its line, to be judged.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from laconic.migration.events import GradientEvents
from laconic.migration.findings import Finding
from laconic.migration.imports import changes
from laconic.migration.names import LACONIC, bindings, full_path, imported
from laconic.migration.script import Script
from laconic.migration.values import assigned_calls, called, constant_of, refers_to, stores_of

AVERAGERS = ("PeriodicModelAverager", "HierarchicalModelAverager")
HOOK_STATES = ("PowerSGDState", "PostLocalSGDState")
OPTIMIZER = "PostLocalSGDOptimizer"
SCALER = "GradScaler"


def misuses(script: Script) -> Iterator[Finding]:
    """What all rules find."""
    is_migrated = _is_migrated(script)
    if not is_migrated:  # the twin averages whatever the gradients are
        yield from _averaging_after_zero_grad(script)
    yield from _different_warm_up(script)
    yield from _state_saved_by_worker_0_only(script)
    yield from _scaler_with_averaging(script, is_migrated)


def _is_migrated(script: Script) -> bool:
    """Whether the script has the twin's names and nothing left to change."""
    uses_twin = any(path.startswith(LACONIC) for path in imported(script.tree))
    return uses_twin and not any(change.finding.kind != "stays" for change in changes(script))


def _misuse(node: ast.expr, rule: str, why: str, way_out: str) -> Finding:
    return Finding(node.lineno, node.col_offset + 1, "misuse", rule, ast.unparse(node), why, way_out)


def _averaging_after_zero_grad(script: Script) -> Iterator[Finding]:
    bound = bindings(script.tree)
    for average in GradientEvents(script.tree).averages_without_gradients():
        # The function of the same name takes the parameters that it is given, with a gradient or without.
        if full_path(average.func, bound) is None:
            yield _misuse(
                average,
                "averaging after zero_grad",
                "torch's averagers take only parameters whose gradient is not None on this worker, and zero_grad() "
                "has set it to None: nothing is averaged, or torch.cat raises",
                "Average between optimizer.step() and zero_grad(); laconic's averagers do not look at gradients.",
            )


def _different_warm_up(script: Script) -> Iterator[Finding]:
    averagers = [(call, _setting(script, call, "warmup_steps", 1)) for call in called(script.tree, AVERAGERS)]
    states = [
        (call, _setting(script, call, "start_localSGD_iter", 2)) for call in called(script.tree, ("PostLocalSGDState",))
    ]
    known = [value for _, value in states if value is not None]
    for call, value in averagers:
        if value is None or not known or len(known) < len(states) or value in known:
            continue
        yield _misuse(
            call,
            "warm-up mismatch",
            f"warmup_steps is {value} here and start_localSGD_iter is {' or '.join(sorted(set(known)))} in "
            f"PostLocalSGDState (line {states[0][0].lineno}): between the two, workers neither average gradients "
            "nor weights, or do both",
            "Give both the same name or number; laconic.post_local_sgd(start=...) has one place for it.",
        )


def _setting(script: Script, call: ast.Call, keyword: str, position: int) -> str | None:
    """The value of an argument as text, a constant's where it is one; `None` if it cannot be seen."""
    if any(isinstance(arg, ast.Starred) for arg in call.args) or any(each.arg is None for each in call.keywords):
        return None
    given = [each.value for each in call.keywords if each.arg == keyword] + call.args[position : position + 1]
    if not given:
        return "0" if keyword == "warmup_steps" else None
    return constant_of(script.tree, given[0]) or ast.unparse(given[0])


def _state_saved_by_worker_0_only(script: Script) -> Iterator[Finding]:
    states = stores_of(script.tree, HOOK_STATES)
    for save in _saves_of_worker_0(script.tree.body, False):
        arguments = [*save.args, *(keyword.value for keyword in save.keywords)]
        if any(refers_to(argument, states) for argument in arguments):
            yield _misuse(
                save,
                "hook state of worker 0 only",
                "each worker has a residual and counters of its own in this state; one worker's, loaded on all, "
                "applies its residual once for each worker (measured: a loss of 28.7 instead of 3.1)",
                "Save on every worker, each to its own file; the twin's state has state_dict() for it.",
            )


def _saves_of_worker_0(body: list[ast.stmt], is_worker_0: bool) -> Iterator[ast.Call]:
    """The calls that save something, where only worker 0 comes."""
    for statement in body:
        for test, branch in _branches(statement):
            yield from _saves_of_worker_0(branch, is_worker_0 or test)
        if is_worker_0:
            yield from _saves(statement)
        if isinstance(statement, ast.If) and _is_rank_test(statement.test, ast.NotEq) and _leaves(statement.body):
            is_worker_0 = True


def _branches(statement: ast.stmt) -> Iterator[tuple[bool, list[ast.stmt]]]:
    """The blocks of a statement, and whether only worker 0 enters each."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            operator = {"body": ast.Eq, "orelse": ast.NotEq}.get(name)
            is_if = isinstance(statement, ast.If) and operator is not None
            yield is_if and _is_rank_test(statement.test, operator), block  # type: ignore[attr-defined, arg-type]
    for handler in getattr(statement, "handlers", []):
        yield False, handler.body


def _is_rank_test(test: ast.expr, operator: type[ast.cmpop]) -> bool:
    """`rank == 0`, `dist.get_rank() == 0`, `not rank`, `is_main_process`, or their opposites."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) and operator is ast.Eq:
        return any(_is_rank_test(part, operator) for part in test.values)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        if _is_a_rank(test.operand):
            return operator is ast.Eq
        return _is_rank_test(test.operand, ast.Eq if operator is ast.NotEq else ast.NotEq)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], operator):
        sides = (test.left, test.comparators[0])
        return any(_is_a_rank(side) for side in sides) and any(_is_zero(side) for side in sides)
    text = _last_name(test)
    return operator is ast.Eq and any(word in text for word in ("is_main", "is_master", "is_rank_zero", "is_chief"))


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value == 0


def _is_a_rank(node: ast.expr) -> bool:
    return "rank" in _last_name(node) and "is_" not in _last_name(node)


def _last_name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    text = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return text.lower()


def _leaves(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return | ast.Continue | ast.Raise)


def _saves(statement: ast.stmt) -> Iterator[ast.Call]:
    """Saving calls of a statement itself, not of the blocks in it."""
    if isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return):
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and any(word in _last_name(node) for word in ("save", "dump")):
                yield node


def _scaler_with_averaging(script: Script, is_migrated: bool) -> Iterator[Finding]:
    tree = script.tree
    scalers = stores_of(tree, (SCALER,))
    optimizers = assigned_calls(tree, (OPTIMIZER,))
    averages = bool(optimizers or list(called(tree, (*AVERAGERS, OPTIMIZER))) or GradientEvents(tree).has_average)
    for call in called(tree, ("step",)):
        is_scaler = isinstance(call.func, ast.Attribute) and refers_to(call.func.value, scalers)
        if not is_scaler or not call.args or not averages:
            continue
        if refers_to(call.args[0], optimizers):
            if is_migrated:  # the twin's averaging is entered also where GradScaler skips the update
                continue
            why = (
                "GradScaler skips the whole step on a worker whose gradients overflowed, and the averaging in it: the "
                "workers' counters part, and each waits for the others for ever (pytorch#76282)"
            )
            way_out = "Take PostLocalSGDOptimizer from laconic.algorithms.optim, whose averaging is always entered."
        else:
            why = (
                "GradScaler decides on each worker by itself: when workers do not average gradients, one skips a step "
                "that the others take, and their scales go different ways"
            )
            way_out = (
                "Use bfloat16, which needs no GradScaler; or wrap the optimizer in laconic's PostLocalSGDOptimizer."
            )
        yield _misuse(call, "GradScaler with averaging", why, way_out)
