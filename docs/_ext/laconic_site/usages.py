"""Which tests use a name, read with `ast`."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Usage:
    """A test, or a helper of tests, that uses a name."""

    path: str
    line: int
    name: str
    imports: frozenset[str]
    """The modules that the file imports."""

    @property
    def is_test(self) -> bool:
        """Whether it is a test itself, and no helper of one."""
        return self.name.startswith(("test_", "Test"))


def read_tests(root: Path) -> dict[str, list[Usage]]:
    """Map every name that the tests use to where they use it. Those of the pages (tests/docs) exercise no code."""
    found: dict[str, list[Usage]] = defaultdict(list)
    for path in sorted((root / "tests").rglob("*.py")):
        if path.parent == root / "tests" / "docs":
            continue
        for name, usage in _read(path.read_text(), path.relative_to(root).as_posix()):
            found[name].append(usage)
    return dict(found)


def exercising(name: str, paths: set[str], usages: dict[str, list[Usage]], most: int = 5) -> list[Usage]:
    """Choose the tests that exercise a name which the files `paths` define: real tests, and those nearest to it."""
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths}
    rooms = {path.split("/")[1] for path in paths if path.count("/") > 1}
    plain = name.replace("-", "_").strip("_").lower()

    def rank(usage: Usage) -> tuple[int, ...]:
        near = bool(modules & usage.imports) + bool(rooms & set(usage.path.split("/")))
        return (-usage.is_test, -(plain in usage.name.lower()), -near, -(plain in usage.path.lower()))

    ranked = sorted(usages.get(name, []), key=rank)
    first_of_file: dict[str, Usage] = {}
    for usage in ranked:
        first_of_file.setdefault(usage.path, usage)
    return list(first_of_file.values())[:most]


def _read(text: str, path: str) -> Iterator[tuple[str, Usage]]:
    """Yield the names of each test, with those of the helpers in the same file that it uses."""
    tree = ast.parse(text)
    imports = frozenset(_imports(tree))
    own = {function.name: (function.lineno, set(_names(function))) for function in _functions(tree)}
    helpers = {name: names for name, (_, names) in own.items()}
    for function, (line, names) in own.items():
        usage = Usage(path, line, function, imports)
        for name in _with_helpers(names, helpers) if usage.is_test else names:
            yield name, usage


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from (each for each in node.body if isinstance(each, ast.FunctionDef))
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node


def _with_helpers(names: set[str], helpers: dict[str, set[str]]) -> set[str]:
    found, waiting = set(names), [name for name in names if name in helpers]
    while waiting:
        for name in helpers[waiting.pop()] - found:
            found.add(name)
            if name in helpers:
                waiting.append(name)
    return found


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _names(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr
        elif isinstance(each, ast.keyword) and each.arg:
            yield each.arg
        elif isinstance(each, ast.alias):
            yield each.name
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield from re.findall(r"(?<![\w-])--[a-z][\w-]*", each.value)  # options
            yield from re.findall(r"\b([A-Za-z_]\w*)(?:\(|$)", each.value)  # plans as text, and names by themselves
            yield from re.findall(r"\b(?:[A-Za-z]+_\w+|[A-Z]\w*[a-z][A-Z]\w*)\b", each.value)  # as in error messages
