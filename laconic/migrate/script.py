"""A script as text and as a LibCST tree, and what is reported about it."""

from __future__ import annotations

import ast
import io
import os
import shutil
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import libcst as cst
import libcst.matchers as m
from libcst import metadata

Kind = Literal["import", "by hand", "stays", "misuse"]
"""`import`: `rewrite` changes it; `by hand`: only a person can; `stays`: right as it is; `misuse`: see its rule."""


class ScriptError(ValueError):
    """The script cannot be read as Python, or cannot be rewritten."""


@dataclass(frozen=True, order=True)
class Finding:
    """One place in a script, what is written there, why it matters and what to do."""

    line: int
    column: int
    kind: Kind
    rule: str
    wrote: str
    why: str
    way_out: str


@dataclass(frozen=True)
class Script:
    """A script; `text` has the file's own line ends, and is the file's bytes in `encoding`."""

    path: Path
    text: str
    encoding: str = "utf-8"


def read_script(path: str | os.PathLike[str]) -> Script:
    """Read a script. Raises `ScriptError` if Python could not read it, `OSError` if the file cannot be opened."""
    path = Path(path)
    if path.suffix == ".ipynb":
        raise ScriptError(
            f"{path}: a notebook is not a script. Export it first: jupyter nbconvert --to script {path.name}"
        )
    data = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return Script(path, data.decode(encoding), encoding)
    except (SyntaxError, UnicodeError) as error:
        raise ScriptError(
            f"{path}:1: its encoding cannot be read ({error}). Python reads a script in the encoding that its "
            "first two lines name, or else UTF-8. Save it in that encoding."
        ) from error


def write(script: Script) -> None:
    """Replace the file in one step. Its mode is kept, and a symbolic link stays one."""
    target = Path(os.path.realpath(script.path))
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        new = Path(folder, target.name)
        with open(new, "wb") as file:
            file.write(script.text.encode(script.encoding))
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(target, new)
        os.replace(new, target)


class Parsed:
    """The imports, uses of imported names, calls and assignments of a script."""

    def __init__(self, module: cst.Module) -> None:
        wrapper = metadata.MetadataWrapper(module, unsafe_skip_copy=True)
        self.module = wrapper.module
        self.positions = wrapper.resolve(metadata.PositionProvider)
        self.parents = wrapper.resolve(metadata.ParentNodeProvider)
        self.imports: list[Any] = list(m.findall(self.module, m.Import() | m.ImportFrom(relative=[])))
        self.imported = [path for node in self.imports for path in imported_paths(node).values()]
        self.calls: list[Any] = list(m.findall(self.module, m.Call()))
        self.uses = dict(self._uses(wrapper.resolve(metadata.ScopeProvider)))
        self.values = list(self._values())

    def _uses(self, scopes: Any) -> Iterator[tuple[Any, str]]:
        """Each dotted expression that begins with an imported name, and its full path; of `a.b.c`, not `a.b` again."""
        for node in m.findall(self.module, m.Attribute() | m.Name()):
            is_part = isinstance(self.parents[node], cst.Attribute | cst.ImportAlias | cst.ImportFrom | cst.AsName)
            if not is_part and dotted(node) and scopes.get(node):
                names = scopes[node].get_qualified_names_for(node)
                paths = sorted(name.name for name in names if name.source is metadata.QualifiedNameSource.IMPORT)
                yield from [(node, path) for path in paths[:1]]

    def _values(self) -> Iterator[tuple[str, Any]]:
        """Each `name = value`, also of attributes; `checkpoint["hook"] = state` is a value of `checkpoint`."""
        nodes: Any = m.findall(self.module, m.Assign() | m.AnnAssign() | m.NamedExpr())
        for node in nodes:
            for target in [each.target for each in node.targets] if isinstance(node, cst.Assign) else [node.target]:
                name = dotted(target.value if isinstance(target, cst.Subscript) else target)
                if name and node.value:
                    yield name, node.value

    def finding(self, node: cst.CSTNode, kind: Kind, rule: str, why: str, way_out: str) -> Finding:
        """Describe a node."""
        start = self.positions[node].start
        return Finding(start.line, start.column + 1, kind, rule, source(node), why, way_out)


def parse(script: Script) -> Parsed:
    """Parse a script; raises `ScriptError` with the line if it is not Python."""
    try:
        ast.parse(script.text)  # for Python's own message
        return Parsed(cst.parse_module(script.text))
    except (SyntaxError, ValueError, RecursionError, MemoryError, cst.ParserSyntaxError) as error:
        line = getattr(error, "lineno", None) or getattr(error, "raw_line", 1)
        raise ScriptError(
            f"{script.path}:{line}: {getattr(error, 'msg', error)}. Only a script that Python and LibCST can parse is "
            "read; nothing was changed. Fix this line first."
        ) from error


def imported_paths(node: cst.Import | cst.ImportFrom) -> dict[Any, str]:
    """Return the full path of each name that is imported; for a star, the module's."""
    if isinstance(node, cst.Import):
        return {alias: alias.evaluated_name for alias in node.names}
    module = f"{dotted(node.module)}"
    if isinstance(node.names, cst.ImportStar):
        return {node.names: module}
    return {alias: f"{module}.{alias.evaluated_name}" for alias in node.names}


def dotted(node: Any) -> str | None:
    """Return `a.b.c` as text, if the expression is nothing else."""
    above = dotted(node.value) if isinstance(node, cst.Attribute) else None
    return f"{above}.{node.attr.value}" if above else node.value if isinstance(node, cst.Name) else None


def source(node: cst.CSTNode) -> str:
    """Return a statement or expression on one line, without comments."""
    code = cst.Module([]).code_for_node(node)
    return ast.unparse(ast.parse(code if isinstance(node, cst.BaseSmallStatement) else f"({code})").body[0])
