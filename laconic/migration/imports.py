"""The imports to change: findings about them, and the edits that change them.

An import changes in place where it can: only the module's path is another. One that also names things without
a twin is split: what has a twin gets a line of its own before it. A name that stands for a whole package, some of
which has no twin, changes only if the script uses nothing that would be missing; else it is left to a person.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from laconic.migration.findings import Finding, Kind
from laconic.migration.names import PACKAGES, TWINS, bindings, concerns, dotted, full_path, outermost_uses, twin_of
from laconic.migration.script import Edit, Script

_WHY = "laconic.algorithms has the same names, and is right where torch's modules are not"
_FROM = re.compile(r"from[ \t]+([\w.]+)[ \t]+import\b")


@dataclass(frozen=True)
class Change:
    """A finding, and the edits that settle it (none if only a person can)."""

    finding: Finding
    edits: tuple[Edit, ...] = ()


def changes(script: Script) -> Iterator[Change]:
    """Every import and dotted path of the script that concerns the twin."""
    uses = _Uses(script)
    for node in ast.walk(script.tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from _from_import(script, node, uses)
        elif isinstance(node, ast.Import):
            yield from _plain_import(script, node, uses)
    yield from _dotted_uses(script, uses)


class _Uses:
    """What the script makes of its imported names."""

    def __init__(self, script: Script) -> None:
        self.bound = bindings(script.tree)
        self.nodes = tuple(outermost_uses(script.tree))
        self.paths = tuple(path for node in self.nodes if (path := full_path(node, self.bound)))
        self.plainly_imported = {
            alias.name
            for node in ast.walk(script.tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            if not alias.asname
        }

    def without_twin(self, package: str) -> list[str]:
        """What the script uses of a package and the twin lacks."""
        return sorted({path for path in self.paths if path.startswith(f"{package}.") and not _longest_twin(path)})


def _longest_twin(path: str) -> str | None:
    """The twin of a path, or of what comes before its last names (`module.Class.method`)."""
    twin = twin_of(path)
    while twin is None and path and path not in PACKAGES:
        path = path.rpartition(".")[0]
        twin = twin_of(path) if path not in PACKAGES else None
    return twin


def _finding(script: Script, node: ast.stmt | ast.expr, kind: Kind, rule: str, why: str, way_out: str) -> Finding:
    return Finding(node.lineno, node.col_offset + 1, kind, rule, ast.unparse(node), why, way_out)


def _stays(script: Script, node: ast.stmt, paths: list[str]) -> Change:
    names = ", ".join(paths)
    return Change(
        _finding(script, node, "stays", "no twin", f"{names} has no twin in laconic.algorithms", "Leave it as it is.")
    )


def _from_import(script: Script, node: ast.ImportFrom, uses: _Uses) -> Iterator[Change]:
    module = str(node.module)
    if [alias.name for alias in node.names] == ["*"]:
        yield from _star_import(script, node, module)
        return
    paths = {alias: f"{module}.{alias.name}" for alias in node.names}
    moving = {alias: twin for alias, path in paths.items() if (twin := twin_of(path))}
    lacking = [path for alias in moving if paths[alias] in PACKAGES for path in uses.without_twin(paths[alias])]
    staying = [path for alias, path in paths.items() if alias not in moving and concerns(path)]
    if lacking:
        yield _mixed_package(script, node, lacking)
    elif moving:
        lines = _import_lines(moving)
        finding = _finding(script, node, "import", "import", _WHY, f"Write: {'; '.join(lines)}")
        yield Change(finding, _from_edits(script, node, moving, lines))
    if staying:
        yield _stays(script, node, staying)


def _star_import(script: Script, node: ast.ImportFrom, module: str) -> Iterator[Change]:
    if module == "torch.distributed.optim" or not concerns(module):
        return
    twin = twin_of(module)
    if twin is None:
        yield _stays(script, node, [module])
        return
    finding = _finding(script, node, "import", "import", _WHY, f"Write: from {twin} import *")
    yield Change(finding, _module_edit(script, node, twin))


def _mixed_package(script: Script, node: ast.stmt, lacking: list[str]) -> Change:
    return Change(
        _finding(
            script,
            node,
            "by hand",
            "mixed package",
            f"the script also uses {', '.join(lacking)}, which has no twin, through the same name",
            "Import what has a twin from laconic.algorithms by a name of its own, and leave this import for the rest.",
        )
    )


def _import_lines(moving: dict[ast.alias, str]) -> list[str]:
    """One `from` import for each module of the twin."""
    by_module: dict[str, list[str]] = {}
    for alias, twin in moving.items():
        module, _, name = twin.rpartition(".")
        bound = alias.asname or alias.name
        by_module.setdefault(module, []).append(name if name == bound else f"{name} as {bound}")
    return [f"from {module} import {', '.join(names)}" for module, names in by_module.items()]


def _from_edits(
    script: Script, node: ast.ImportFrom, moving: dict[ast.alias, str], lines: list[str]
) -> tuple[Edit, ...]:
    """Change the module's path if all names move to one module, else split."""
    modules = {twin.rpartition(".")[0] for twin in moving.values()}
    if len(moving) == len(node.names) and len(modules) == 1:
        return _module_edit(script, node, modules.pop()) + _renames(script, moving)
    start, _ = script.span(node)
    before = script.text[script.position(node.lineno, 0) : start]
    gap = "; " if before.strip() else script.newline + before
    inserted = Edit(start, start, "".join(line + gap for line in lines))
    if len(moving) == len(node.names):
        return (Edit(start, script.span(node)[1], gap.join(lines)),)
    return (inserted, *_removals(script, node, list(moving)))


def _module_edit(script: Script, node: ast.ImportFrom, module: str) -> tuple[Edit, ...]:
    start, end = script.span(node)
    match = _FROM.match(script.text, start, end)
    # A path written with spaces or over a line's end is legal, and rare enough to leave to a person.
    return (Edit(match.start(1), match.end(1), module),) if match else ()


def _renames(script: Script, moving: dict[ast.alias, str]) -> tuple[Edit, ...]:
    """The short names that torch gives its modules become `powerSGD_hook as powerSGD`."""
    edits = []
    for alias, twin in moving.items():
        name = twin.rpartition(".")[2]
        if name != alias.name:
            start, end = script.span(alias)
            edits.append(Edit(start, end, f"{name} as {alias.asname or alias.name}"))
    return tuple(edits)


def _removals(script: Script, node: ast.ImportFrom, moving: list[ast.alias]) -> tuple[Edit, ...]:
    """Take names out of a list of imports, each with one comma; comments between them stay."""
    kept = [alias for alias in node.names if alias not in moving]
    tail = node.names[node.names.index(kept[-1]) + 1 :]
    edits = []
    if tail and (not script.source(node).endswith(")") or tail[-1].lineno == kept[-1].end_lineno):
        # Nothing is kept after these: the comma before them goes, since outside brackets none may end the list.
        edits.append(Edit(script.span(kept[-1])[1], script.span(tail[-1])[1], ""))
        moving = [alias for alias in moving if alias not in tail]
    for alias in moving:
        start, end = script.span(alias)
        comma = re.compile(r"[ \t]*,?[ \t]*").match(script.text, end)
        edits.append(_whole_line(script, start, comma.end() if comma else end))
    return tuple(edits)


def _whole_line(script: Script, start: int, end: int) -> Edit:
    """If nothing else is on the line, the line goes."""
    line_start = max(script.text.rfind("\n", 0, start), script.text.rfind("\r", 0, start)) + 1
    rest = re.compile(r"[ \t]*(?:\r\n|\r|\n)").match(script.text, end)
    if rest and not script.text[line_start:start].strip() and line_start < start:
        return Edit(line_start, rest.end(), "")
    return Edit(start, end, "")


def _plain_import(script: Script, node: ast.Import, uses: _Uses) -> Iterator[Change]:
    for alias in node.names:
        if not concerns(alias.name) or alias.name == "torch.distributed.optim":
            continue
        twin = twin_of(alias.name)
        lacking = uses.without_twin(alias.name) if alias.name in PACKAGES else []
        if twin is None:
            yield _stays(script, node, [alias.name])
        elif lacking:
            yield _mixed_package(script, node, lacking)
        else:
            text = f"import {twin}" + (f" as {alias.asname}" if alias.asname else "")
            finding = _finding(script, node, "import", "import", _WHY, f"Write: {text}")
            yield Change(finding, _plain_edits(script, node, alias, twin, uses))


def _plain_edits(script: Script, node: ast.Import, alias: ast.alias, twin: str, uses: _Uses) -> tuple[Edit, ...]:
    start, _ = script.span(alias)
    if script.text[start : start + len(alias.name)] != alias.name:
        return ()
    edit = Edit(start, start + len(alias.name), twin)
    if alias.asname or not _needs_torch(script, alias, uses):
        return (edit,)
    # This import also bound the name `torch`, which the script goes on using.
    return (Edit(edit.start, edit.end, f"torch, {twin}"),)


def _needs_torch(script: Script, alias: ast.alias, uses: _Uses) -> bool:
    others = [name for name in uses.plainly_imported if name.split(".")[0] == "torch" and not twin_of(name)]
    used = any(path.split(".")[0] == "torch" and not _rewritten(path, uses) for path in uses.paths)
    return used and not others and alias.name.startswith("torch.")


def _rewritten(path: str, uses: _Uses) -> str | None:
    """The twin's path of a dotted use, if a plain import of the script brings that module in."""
    twin = _longest_twin(path)
    imported = [name for name in uses.plainly_imported if path.startswith(f"{name}.") and twin_of(name)]
    return twin if twin and any(not uses.without_twin(name) for name in imported) else None


def _dotted_uses(script: Script, uses: _Uses) -> Iterator[Change]:
    """Paths written out in full, `torch.distributed.algorithms...`, or through a package's name."""
    for node in uses.nodes:
        path = full_path(node, uses.bound)
        twin = _longest_twin(path) if path else None
        written = dotted(node)
        if not path or not twin or not written or _is_bound_by_a_changed_import(written, uses):
            continue
        is_in_full = written == path and _rewritten(path, uses) is not None
        kind: Kind = "import" if is_in_full else "by hand"
        module = _module_of(twin)
        way_out = f"Write: {twin}" if is_in_full else f"Add: import {module}, and write here: {twin}"
        finding = _finding(script, node, kind, "dotted path", _WHY, way_out)
        yield Change(finding, _dotted_edit(script, node, path, twin) if is_in_full else ())


def _is_bound_by_a_changed_import(written: str, uses: _Uses) -> bool:
    """Of a name that an import binds to something with a twin, the import is what changes."""
    bound = uses.bound[written.split(".")[0]]
    return twin_of(bound) is not None and not (bound in PACKAGES and uses.without_twin(bound))


def _module_of(twin: str) -> str:
    while twin not in TWINS.values():
        twin = twin.rpartition(".")[0]
    return twin


def _dotted_edit(script: Script, node: ast.expr, path: str, twin: str) -> tuple[Edit, ...]:
    """Only the part of the path that the twin replaces, if it is written without a break."""
    start, _ = script.span(node)
    replaced = path
    while replaced and twin_of(replaced) != twin:
        replaced = replaced.rpartition(".")[0]
    if script.text[start : start + len(replaced)] != replaced:
        return ()
    return (Edit(start, start + len(replaced), twin),)
