"""Imports point down the list of docs/architecture.md, and each storey keeps to its rules."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import laconic

HOME = Path(laconic.__file__).parent
CORE = {
    "values",
    "plans",
    "codecs",
    "kernels",
    "comm",
    "checks",
    "ledger",
    "cost",
    "session",
    "torch_private",
    "errors",
    "exchange",
}
MAY_IMPORT = {
    "values": set(),
    "errors": set(),
    "exchange": set(),
    "atomic_write": set(),
    "torch_private": {"values"},
    "ledger": {"values"},
    "plans": {"values", "codecs", "errors", "exchange"},
    "codecs": {"values", "kernels", "exchange", "torch_private.codecs"},
    "kernels": {"codecs", "exchange"},
    "comm": {"values", "ledger", "torch_private", "codecs", "plans.schedules", "errors", "exchange"},
    "checks": {"values", "comm", "codecs", "errors", "exchange"},
    "cost": {"values", "plans", "codecs", "comm", "ledger", "exchange"},
    "session": CORE,
    "guard": CORE,
    "algorithms": CORE,
    "checkpoint": {"values", "ledger", "errors"},
    "elastic": CORE | {"checkpoint", "atomic_write"},
    "integrations": CORE | {"checkpoint", "elastic"},
    "tools": CORE | {"atomic_write", "elastic"},
}
"""Rooms, or modules of one, by room. `cli` imports everything, and nothing imports it."""
SOURCES = {path.relative_to(HOME): path.read_text() for path in sorted(HOME.rglob("*.py"))}


def _imports(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _in(room: str) -> dict[str, set[str]]:
    return {str(path): _imports(source) for path, source in SOURCES.items() if path.parts[0] in (room, f"{room}.py")}


def test_every_room_has_a_rule():
    rooms = {path.parts[0].removesuffix(".py") for path in SOURCES} - {"__init__", "__main__", "cli"}
    assert rooms == set(MAY_IMPORT)


def test_imports_point_down():
    for room, allowed in MAY_IMPORT.items():
        for path, names in _in(room).items():
            for name in names:
                target = name.removeprefix("laconic.")
                public = target in laconic.__all__ and room not in CORE
                if target != name and target != "__version__" and not public:
                    fine = any(target == each or target.startswith(f"{each}.") for each in allowed | {room})
                    assert fine, f"{path} imports {name}"


def test_values_and_codecs_know_no_network():
    for room in ("plans", "codecs", "kernels", "values"):
        for path, names in _in(room).items():
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
    found = {path.parts[0] for path, source in SOURCES.items() if "socket" in _imports(source)}
    assert found <= {"tools", "elastic"}


def test_class_names_are_unique():
    classes: dict[str, Path] = {}
    for path, source in SOURCES.items():
        names = re.findall(r"^class ([a-zA-Z]\w*)", source, re.M) if path.parts[0] != "integrations" else []
        for name in names:  # an integration has its own `Run`, used as `torchft.Run`
            assert name not in classes, f"{name} is in {path} and in {classes[name]}"
            classes[name] = path
