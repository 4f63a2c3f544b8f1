"""What the source files define, raise and export, read with `ast`: nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

STOP_WORDS = frozenset(
    [
        *("all", "and", "are", "args", "been", "but", "cls", "for", "from", "has", "kwargs", "not", "self", "some"),
        *("step", "the", "this", "use", "was", "what", "when", "which", "with"),
    ]
)
"""Identifiers that say nothing by themselves. Those of one or two letters are left out as well."""


@dataclass(frozen=True)
class Definition:
    """Where a name is defined: `qualname` is the name with its class or function."""

    name: str
    kind: str
    qualname: str
    path: str
    line: int
    doc: str = ""


@dataclass(frozen=True)
class Source:
    """One source file."""

    path: str
    text: str
    doc: str
    definitions: tuple[Definition, ...]
    raises: dict[str, int] = field(hash=False)
    """The line of the first `raise` of each error."""
    exports: tuple[str, ...]
    """`__all__`; empty if there is none."""

    @property
    def module(self) -> str:
        """The name by which the file is imported."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def is_keyword(name: str) -> bool:
    """Return whether a name belongs in the index.

    >>> [name for name in ("rank", "x", "self", "_private", "PowerSGDState") if is_keyword(name)]
    ['rank', 'PowerSGDState']
    """
    return not name.startswith("_") and len(name) > 2 and name not in STOP_WORDS


def read_sources(root: Path, folders: tuple[str, ...] = ("laconic",)) -> list[Source]:
    """Read all Python files below the folders of a repository."""
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    sources = [read_source(path.read_text(), path.relative_to(root).as_posix()) for path in paths]
    exported = {name for source in sources for name in source.exports}
    return [_without_private_parameters(source, exported) for source in sources]


def read_source(text: str, path: str) -> Source:
    """Read one file."""
    tree = ast.parse(text)
    found = [d for d in _definitions(tree, path) if is_keyword(d.name)]
    raises: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and (name := _raised(node)):
            raises.setdefault(name, node.lineno)
    doc = ast.get_docstring(tree) or ""
    return Source(path, text, doc, tuple(found), raises, _exports(tree))


def _without_private_parameters(source: Source, exported: set[str]) -> Source:
    """Keep the parameters of what some `__all__` exports: those of all others would drown the index."""
    kept = tuple(
        d for d in source.definitions if d.kind != "parameter" or d.qualname.split(".")[0].split("(")[0] in exported
    )
    return Source(source.path, source.text, source.doc, kept, source.raises, source.exports)


def _definitions(tree: ast.Module, path: str) -> Iterator[Definition]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            kind = "error" if node.name.endswith("Error") else "class"
            yield Definition(node.name, kind, node.name, path, node.lineno, _first_line(node))
            if not node.name.startswith("_"):
                yield from _members(node, path)
        elif isinstance(node, ast.FunctionDef):
            yield Definition(node.name, "function", node.name, path, node.lineno, _first_line(node))
            yield from _parameters(node, node.name, path)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for name in _targets(node):
                yield Definition(name, "constant", name, path, node.lineno)


def _members(owner: ast.ClassDef, path: str) -> Iterator[Definition]:
    for node in owner.body:
        if isinstance(node, ast.FunctionDef):
            if node.name == "__init__":
                yield from _parameters(node, owner.name, path)
                continue
            kind = "attribute" if any(_is_property(d) for d in node.decorator_list) else "method"
            yield Definition(node.name, kind, f"{owner.name}.{node.name}", path, node.lineno, _first_line(node))
            if not node.name.startswith("_"):
                yield from _parameters(node, f"{owner.name}.{node.name}", path)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            for name in _targets(node):
                yield Definition(name, "attribute", f"{owner.name}.{name}", path, node.lineno)


def _parameters(function: ast.FunctionDef, owner: str, path: str) -> Iterator[Definition]:
    arguments = function.args
    for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        yield Definition(each.arg, "parameter", f"{owner}({each.arg}=)", path, each.lineno)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _is_property(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id in ("property", "cached_property")


def _raised(node: ast.Raise) -> str:
    error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    name = error.attr if isinstance(error, ast.Attribute) else getattr(error, "id", "")
    return name if re.fullmatch(r"[A-Z]\w*(Error|Warning|Stopped)", name) else ""


def _exports(tree: ast.Module) -> tuple[str, ...]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and _targets(node) == ["__all__"] and isinstance(node.value, ast.List):
            return tuple(str(each.value) for each in node.value.elts if isinstance(each, ast.Constant))
    return ()


def _first_line(node: ast.ClassDef | ast.FunctionDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0]
