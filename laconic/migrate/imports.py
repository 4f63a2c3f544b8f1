"""The imports to change: findings about them, and the nodes that replace them.

An import that also names things without a twin is split: what has a twin gets an import of its own before it. A name
for a whole package changes only if laconic has everything that the script uses of it; otherwise a person must decide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import libcst as cst
import libcst.matchers as m

from laconic.migrate.script import Finding, Parsed, dotted, imported_paths, source

TORCH, LACONIC, OPTIM = "torch.distributed.algorithms", "laconic.algorithms", "torch.distributed.optim"
_HOOKS = ("powerSGD_hook", "post_localSGD_hook", "default_hooks", "quantization_hooks", "debugging_hooks")
_SHORT = {hook.partition("_")[0]: hook for hook in _HOOKS if hook != "post_localSGD_hook"}  # torch has both names
_MODULES = {
    **{TORCH + path: LACONIC + path for path in ("", ".ddp_comm_hooks", ".model_averaging")},
    **{f"{TORCH}.ddp_comm_hooks.{hook}": f"{LACONIC}.ddp_comm_hooks.{hook}" for hook in _HOOKS},
    **{f"{TORCH}.ddp_comm_hooks.{short}": f"{LACONIC}.ddp_comm_hooks.{hook}" for short, hook in _SHORT.items()},
    **{
        f"{TORCH}.model_averaging.{module}": f"{LACONIC}.model_averaging.{module}"
        for module in ("averagers", "hierarchical_model_averager", "utils")
    },
    f"{OPTIM}.post_localSGD_optimizer": f"{LACONIC}.optim",
}
_NAMES = {
    f"{TORCH}.ddp_comm_hooks.DDPCommHookType": f"{LACONIC}.ddp_comm_hooks.DDPCommHookType",
    f"{TORCH}.ddp_comm_hooks.register_ddp_comm_hook": f"{LACONIC}.ddp_comm_hooks.register_ddp_comm_hook",
    f"{OPTIM}.PostLocalSGDOptimizer": f"{LACONIC}.optim.PostLocalSGDOptimizer",
}
_PACKAGES = {TORCH, f"{TORCH}.ddp_comm_hooks", f"{TORCH}.model_averaging", "torch.distributed", OPTIM}
"""Packages of which laconic has only a part."""
_SEPARATE = "Import what has a twin from laconic.algorithms by a name of its own, and leave this import for the rest."
_WHY = "laconic.algorithms has the same names, and is right where torch's modules are not"


def twin_of(path: str) -> str | None:
    """Return the path in laconic of a module of torch, or of a name in one; `None` if there is none.

    >>> twin_of("torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager")
    'laconic.algorithms.model_averaging.averagers.PeriodicModelAverager'
    >>> twin_of("torch.distributed.algorithms.join") is None
    True
    """
    if path in _MODULES or path in _NAMES:
        return _MODULES.get(path) or _NAMES[path]
    module, _, attribute = path.rpartition(".")
    above = twin_of(module) if module and module not in _PACKAGES else None
    return f"{above}.{attribute}" if above else None


def changes(script: Parsed) -> tuple[list[Finding], dict[Any, list[Any]]]:
    """Return the findings about imports, and what replaces each node that `rewrite` changes."""
    findings: list[Finding] = []
    new: dict[Any, list[Any]] = {}
    for node in script.imports:
        findings += _import(script, node, new)
    for node, path in script.uses.items():
        findings += _dotted_use(script, node, path, new)
    return findings, new


def _import(script: Parsed, node: cst.Import | cst.ImportFrom, new: dict[Any, list[Any]]) -> Iterator[Finding]:
    paths = imported_paths(node)
    twins = {alias: twin for alias, path in paths.items() if (twin := twin_of(path))}
    staying = [path for alias, path in paths.items() if alias not in twins and path.startswith(f"{TORCH}.")]
    lacking = [use for alias in twins for use in _lacking(script, paths[alias])]
    if staying:
        why = f"{', '.join(staying)} has no twin in laconic.algorithms"
        yield script.finding(node, "stays", "no twin", why, "Leave it as it is.")
    if lacking:
        why = f"the script also uses {', '.join(lacking)}, which has no twin, through the same name"
        yield script.finding(node, "by hand", "mixed package", why, _SEPARATE)
    elif twins:
        new[node] = _split(node, twins) if isinstance(node, cst.ImportFrom) else [_plain(script, node, twins)]
        lines = "; ".join(line for line in map(source, new[node]) if "laconic" in line)
        yield script.finding(node, "import", "import", _WHY, f"Write: {lines}")


def _lacking(script: Parsed, path: str) -> list[str]:
    """What the script uses of a package and laconic does not have."""
    used = {use for use in script.uses.values() if use.startswith(f"{path}.") and not twin_of(use)}
    return sorted(used) if path in _PACKAGES else []


def _plain(script: Parsed, node: cst.Import, twins: dict[Any, str]) -> cst.Import:
    """`import a.b`. Without `as` it also binds `torch`: that is then imported too, unless another import does so."""
    names = [alias.with_changes(name=_path(twins[alias])) if alias in twins else alias for alias in node.names]
    others = [alias.evaluated_name for each in script.imports for alias in _unaliased(each)]
    is_bound = any(path.split(".")[0] == "torch" and not twin_of(path) for path in others)
    if not is_bound and any(alias in twins for alias in _unaliased(node)):
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        names.insert(0, cst.ImportAlias(cst.Name("torch"), comma=comma))
    return node.with_changes(names=names)


def _unaliased(node: Any) -> list[cst.ImportAlias]:
    return [alias for alias in node.names if not alias.asname] if isinstance(node, cst.Import) else []


def _path(dotted_path: str) -> Any:
    return cst.parse_expression(dotted_path)


def _split(node: cst.ImportFrom, twins: dict[Any, str]) -> list[Any]:
    """One import for each module of laconic, and one for the names that stay."""
    if isinstance(node.names, cst.ImportStar):
        return [node.with_changes(module=_path(twins[node.names]))]
    groups: dict[str, list[cst.ImportAlias]] = defaultdict(list)
    for alias in node.names:
        module, _, name = twins.get(alias, "").rpartition(".")
        if name and name != alias.evaluated_name:  # `powerSGD` becomes `powerSGD_hook as powerSGD`
            asname = alias.asname or cst.AsName(name=cst.Name(alias.evaluated_name))
            groups[module].append(alias.with_changes(name=cst.Name(name), asname=asname))
        else:
            groups[module].append(alias)
    rest = groups.pop("", [])
    parts = [_part(node, names).with_changes(module=_path(module)) for module, names in groups.items()]
    parts += [_part(node, rest)] if rest else []
    return [*(part.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for part in parts[:-1]), parts[-1]]


def _part(node: cst.ImportFrom, names: list[cst.ImportAlias]) -> cst.ImportFrom:
    """The import with only these of its names. A comment after a name stays with it."""
    last, end = names[-1], node.names[-1].comma  # type: ignore[index]
    if last.comma is end:
        return node.with_changes(names=names)
    if isinstance(last.comma, cst.Comma) and m.findall(last.comma, m.Comment()):
        space = last.comma.whitespace_after.with_changes(last_line=cst.SimpleWhitespace(""))
        end, bracket = last.comma.with_changes(whitespace_after=space), cst.RightParen()
    else:
        end, bracket = _uncommented(end), _uncommented(node.rpar)
    return node.with_changes(names=[*names[:-1], last.with_changes(comma=end)], rpar=bracket)


def _uncommented(node: Any) -> Any:
    comment = m.TrailingWhitespace(comment=m.Comment())
    return m.replace(node, comment, cst.TrailingWhitespace()) if isinstance(node, cst.CSTNode) else node


def _dotted_use(script: Parsed, node: Any, path: str, new: dict[Any, list[Any]]) -> Iterator[Finding]:
    """A path written in full, `torch.distributed.algorithms...`, or through the name of a package."""
    written, twin = f"{dotted(node)}", twin_of(path)
    first = path.removesuffix(written.removeprefix(written.split(".")[0]))  # what its first name stands for
    if twin is None or (twin_of(first) and not _lacking(script, first)):
        return  # laconic does not have it, or the import of its first name changes
    changed = [alias.evaluated_name for each in new for alias in _unaliased(each) if twin_of(alias.evaluated_name)]
    code = cst.Module([]).code_for_node(node.with_changes(lpar=(), rpar=()))
    if code == written == path and any(f"{path}.".startswith(f"{module}.") for module in changed):
        new[node] = [_path(twin).with_changes(lpar=node.lpar, rpar=node.rpar)]
        yield script.finding(node, "import", "dotted path", _WHY, f"Write: {twin}")
    else:
        module = max((each for each in _MODULES.values() if f"{twin}.".startswith(f"{each}.")), key=len)
        yield script.finding(node, "by hand", "dotted path", _WHY, f"Add: import {module}, and write here: {twin}")


class Replace(cst.CSTTransformer):
    """Puts the new nodes in the place of the old ones, and a split import on lines of its own where it can."""

    def __init__(self, new: dict[Any, list[Any]]) -> None:
        super().__init__()
        self.new = new

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Called by LibCST for every node."""
        if nodes := self.new.get(original_node):
            return cst.FlattenSentinel(nodes) if len(nodes) > 1 else nodes[0]
        if isinstance(original_node, cst.SimpleStatementLine):
            count = len(self.new.get(original_node.body[0], [0])) - 1
            lines = [cst.SimpleStatementLine([statement]) for statement in updated_node.body[:count]]
            if lines:
                lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
                last = updated_node.with_changes(leading_lines=(), body=updated_node.body[count:])
                return cst.FlattenSentinel([*lines, last])
        return super().on_leave(original_node, updated_node)
