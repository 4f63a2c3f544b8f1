"""What can be known of a script's values from its plain assignments."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from laconic.migration.names import dotted


def called(tree: ast.AST, names: tuple[str, ...]) -> Iterator[ast.Call]:
    """The calls of a function, class or method with one of these names, in the order of the text."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name_of(node) in names]
    yield from sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def _name_of(call: ast.Call) -> str:
    return (dotted(call.func) or (call.func.attr if isinstance(call.func, ast.Attribute) else "")).rpartition(".")[2]


def assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Each `name = value`, also of attributes (`self.state = ...`) and of `with ... as name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _targets(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield from _targets(node.target, node.value)


def _targets(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Subscript):  # checkpoint["hook"] = state: the checkpoint holds it
        target = target.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for each, part in zip(target.elts, value.elts, strict=True):
            yield from _targets(each, part)
    elif name := dotted(target):
        yield name, value


def assigned_calls(tree: ast.Module, classes: tuple[str, ...]) -> frozenset[str]:
    """The names to which an object of one of these classes is assigned."""
    return frozenset(
        name for name, value in assignments(tree) if isinstance(value, ast.Call) and _name_of(value) in classes
    )


def stores_of(tree: ast.Module, classes: tuple[str, ...]) -> frozenset[str]:
    """Those names, and the names of dicts, lists and tuples that hold what they stand for."""
    stores = assigned_calls(tree, classes)
    while True:
        more = stores | {name for name, value in assignments(tree) if refers_to(value, stores)}
        if more == stores:
            return stores
        stores = more


def refers_to(value: ast.expr, names: frozenset[str]) -> bool:
    """Whether a value is, or holds, what one of the names stands for."""
    if dotted(value) in names:
        return True
    if isinstance(value, ast.Dict):
        return any(refers_to(each, names) for each in value.values)
    if isinstance(value, ast.List | ast.Tuple | ast.Set):
        return any(refers_to(each, names) for each in value.elts)
    if isinstance(value, ast.Call):
        return _call_refers_to(value, names)
    return False


def _call_refers_to(call: ast.Call, names: frozenset[str]) -> bool:
    """`dict(hook=state)`, `pickle.dumps(state)`, `state.state_dict()`."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("state_dict", "__getstate__"):
        return refers_to(call.func.value, names)
    if _name_of(call) in ("dict", "list", "dumps", "deepcopy", "copy", "vars"):
        return any(refers_to(each, names) for each in [*call.args, *(keyword.value for keyword in call.keywords)])
    return False


def constant_of(tree: ast.Module, node: ast.expr) -> str | None:
    """The number that an expression stands for, if it is one or a name assigned once, to one."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return str(node.value)
    values = [value for name, value in assignments(tree) if name == dotted(node)]
    if isinstance(node, ast.Name) and len(values) == 1 and isinstance(values[0], ast.Constant):
        return constant_of(tree, values[0])
    return None
