"""Imports point down the list of docs/architecture.md, and each storey keeps to its rules."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import laconic

HOME = Path(laconic.__file__).parent
SOURCES = {path.relative_to(HOME): path.read_text() for path in sorted(HOME.rglob("*.py"))}
BOTTOM = {"values", "errors", "exchange", "packing", "ledger", "torch_private"}
CORE = BOTTOM | {"kernels", "codecs", "plans", "comm", "checks", "cost"}
TRAINING = CORE | {"session", "noise", "guard"}
MAY_IMPORT: dict[str, set[str]] = {
    "values": set(),
    "errors": set(),
    "exchange": set(),
    "torch_private": set(),
    "optim": set(),
    "atomic_write": set(),
    "packing": {"exchange", "torch_private"},
    "ledger": {"values"},
    "kernels": {"exchange", "packing"},
    "codecs": {"values", "exchange", "packing", "kernels", "torch_private"},
    "plans": {"values", "errors", "exchange", "codecs"},
    "comm": BOTTOM,
    "checks": BOTTOM | {"comm"},
    "cost": BOTTOM | {"codecs", "plans", "comm"},
    "session": CORE | {"optim"},
    "noise": set(),
    "guard": CORE | {"session", "noise"},
    "data": {"values", "errors", "session"},
    "algorithms": TRAINING,
    "checkpoint": TRAINING | {"atomic_write"},
    "elastic": TRAINING | {"data", "checkpoint", "atomic_write"},
    "integrations": TRAINING | {"checkpoint", "elastic"},
    "tools": TRAINING | {"atomic_write", "elastic"},
    "cli": TRAINING | {"atomic_write", "elastic", "tools"},
}
"""Which rooms a room may import, from the bottom up. `public.py` collects public names from all of them."""


def _is_for_types_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _imports(node: ast.AST) -> set[str]:
    """Return the names that a module imports, also inside functions, or as the string "laconic.module:function"."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        return {f"{node.module}.{alias.name}" for alias in node.names}
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value} if re.fullmatch(r"laconic(\.\w+)+:\w+", node.value) else set()
    below = [] if _is_for_types_alone(node) else ast.iter_child_nodes(node)
    return {name for each in below for name in _imports(each)}


IMPORTS = {path: _imports(ast.parse(source)) for path, source in SOURCES.items()}


def _room_of(name: str) -> str:
    """Return the room of a module or of a name in it; of a public name, that of its definition."""
    inside = name.removeprefix("laconic.").replace(":", ".").split(".")[0]
    if inside in MAY_IMPORT:
        return inside
    home = getattr(getattr(laconic, inside), "__module__", "laconic.values")
    return _room_of(home)


def test_imports_point_down():
    rooms = list(MAY_IMPORT)
    assert all(rooms.index(each) < rooms.index(room) for room, allowed in MAY_IMPORT.items() for each in allowed)
    for path, names in IMPORTS.items():
        room = path.parts[0].removesuffix(".py")
        for name in names if room not in ("__init__", "__main__", "public") else ():
            if name.startswith("laconic."):
                assert _room_of(name) in MAY_IMPORT[room] | {room}, f"{path} imports {name}"


def test_values_and_codecs_know_no_network():
    for path, names in IMPORTS.items():
        if path.parts[0].removesuffix(".py") in ("plans", "codecs", "kernels", "values", "exchange", "packing"):
            assert not any(name.startswith("torch.distributed") for name in names), path


def test_only_the_session_installs_hooks():
    hooks = re.compile(r"\.(register_comm_hook|set_all_reduce_hook|register_step_(pre|post)_hook)\(")
    found = {path.parts[0] for path, source in SOURCES.items() if hooks.search(source)}
    assert found <= {"session", "torch_private", "algorithms"}  # the twin registers hooks as torch does


def test_other_rooms_use_public_names_of_the_session():
    for path, source in SOURCES.items():
        if path.parts[0] != "session":
            assert not re.search(r"\bsession\._", source), path


def test_sockets_are_for_measuring_and_launching():
    found = {path.parts[0] for path, source in SOURCES.items() if "socket" in IMPORTS[path]}
    assert found <= {"tools", "elastic"}


def test_class_names_are_unique():
    classes: dict[str, Path] = {}
    for path, source in SOURCES.items():
        names = re.findall(r"^class ([a-zA-Z]\w*)", source, re.M) if path.parts[0] != "integrations" else []
        for name in names:  # an integration has its own `Run`, used as `torchft.Run`
            assert name not in classes, f"{name} is in {path} and in {classes[name]}"
            classes[name] = path
