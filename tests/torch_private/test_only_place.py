"""`laconic/torch_private/` is the only place that uses what torch keeps private."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import laconic

HOME = Path(laconic.__file__).parent
SOURCES = {path: ast.parse(path.read_text()) for path in sorted(HOME.rglob("*.py"))}
PRIVATE = re.compile(r"_[A-Za-z]\w*")
LOOKS_UP = {"getattr", "hasattr", "setattr", "delattr", "attrgetter"}
PYTHON = {"_getframe", "_exit", "_replace", "_asdict", "_fields"}
"""Names with an underscore that Python documents."""
OTHERS = {
    "session/foreign.py": {
        "Fabric's wrapper": ["_forward_module"],
        "Accelerate's optimizer": ["_is_overflow", "_accelerate_step_called"],
    },
    "integrations/lightning.py": {"Lightning's DDPStrategy": ["_ddp_comm_hook", "_ddp_comm_state"]},
    "integrations/torchft.py": {"torchft's Manager": ["_use_async_quorum", "_timeout"]},
}
"""What other frameworks keep private, where it is used: `make frameworks` tries it."""


def _own(tree: ast.AST) -> Iterator[str]:
    """Yield what a file of laconic defines: functions, classes, variables, attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root(node) == "self":
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("laconic"):
            yield from (alias.asname or alias.name for alias in node.names)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _private_uses(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Yield private names that are not laconic's own: attributes, imports, names in strings that look one up."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            from_torch = _root(node) in ("torch", "dist", "nn")
            names = [node.attr] if from_torch or node.attr not in own else []
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("laconic"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            names = [] if node.module == "__future__" else names
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in LOOKS_UP:
            strings = [each.value for each in node.args if isinstance(each, ast.Constant)]
            names = [part for text in strings if isinstance(text, str) for part in text.split(".") if part not in own]
        for name in names:
            if PRIVATE.fullmatch(name) and name not in PYTHON:
                yield f"{name} in line {node.lineno}"  # type: ignore[attr-defined]


OWN = {name for tree in SOURCES.values() for name in _own(tree)}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("torch._foreach_mul_(x, 2)", ["_foreach_mul_"]),
        ("group._get_backend(device)", ["_get_backend"]),
        ("from torch._C._distributed_c10d import Store", ["_C", "_distributed_c10d"]),
        ("attrgetter('_join_config.enable')", ["_join_config"]),
        ("getattr(model, '_orig_mod')", ["_orig_mod"]),
        ("self._per_device_tensors", ["_per_device_tensors"]),
        ("self._mine = 1\nself._mine\nsys._getframe(1)\nx.__class__", []),
    ],
)
def test_what_counts_as_private(code, found):
    tree = ast.parse(code)
    assert [each.split()[0] for each in _private_uses(tree, set(_own(tree)))] == found


def test_nothing_private_is_used_elsewhere():
    uses = {
        str(path.relative_to(HOME)): list(_private_uses(tree, OWN))
        for path, tree in SOURCES.items()
        if path.parent.name != "torch_private"
    }
    others = {place: [name for names in found.values() for name in names] for place, found in OTHERS.items()}
    left = {path: [use for use in found if use.split()[0] not in others.get(path, [])] for path, found in uses.items()}
    assert {path: found for path, found in left.items() if found} == {}
