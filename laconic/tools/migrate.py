"""Find what to change in a training script to move it from torch's hooks and averagers to laconic's.

LibCST parses the script; it is never run. `ParsedScript.findings` are the imports to change and known misuses, found by
names and plain assignments. `ParsedScript.rewritten` changes the imports and keeps every other byte.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any, Literal

from laconic.tools.machine import pip_install

try:
    import libcst as cst
    import libcst.matchers as m
    from libcst import metadata
except ImportError as error:
    raise ImportError(
        "laconic.tools.migrate reads scripts with LibCST, which is not installed. "
        f"{pip_install('migrate')} installs it."
    ) from error

__all__ = ["ParsedScript", "ScriptChange", "ScriptError", "twin_of"]

_HOOKS = (
    "DDPCommHookType register_ddp_comm_hook default default_hooks powerSGD powerSGD_hook quantization "
    "quantization_hooks debugging debugging_hooks post_localSGD_hook"
)
_AVERAGING = "averagers hierarchical_model_averager utils"
_PATHS = [f"ddp_comm_hooks.{name}" for name in _HOOKS.split()] + [f"model_averaging.{n}" for n in _AVERAGING.split()]
_TWINS = {
    **{f"torch.distributed.algorithms.{path}": f"laconic.algorithms.{path}" for path in _PATHS},
    "torch.distributed.optim.post_localSGD_optimizer": "laconic.algorithms.optim",
    "torch.distributed.optim.PostLocalSGDOptimizer": "laconic.algorithms.optim.PostLocalSGDOptimizer",
}
_WHY = "laconic.algorithms has the same names, and is right where torch's modules are not"
_MISUSES = {
    "averaging after zero_grad": (
        "torch's averagers skip parameters whose gradient is None, as it is after zero_grad(), or torch.cat raises",
        "Average between optimizer.step() and zero_grad(); laconic's averagers do not look at gradients.",
    ),
    "warm-up mismatch": (
        "warmup_steps is {} here and start_localSGD_iter is {} in PostLocalSGDState (line {}): between the two, "
        "workers average neither gradients nor weights, or average both",
        "Give both the same name or number; laconic.post_local_sgd(start=...) has one place for it.",
    ),
    "hook state of worker 0 only": (
        "each worker has its own residual in this state; if all load that of worker 0, it is applied once for each",
        "Save on every worker, each to its own file; the twin's state has state_dict() for it.",
    ),
    "GradScaler with averaging": (
        "GradScaler skips a step, and the averaging in it, only on workers whose gradients overflowed: counters and "
        "scales differ from then on, and the workers can wait for each other without end (pytorch#76282)",
        "Use PostLocalSGDOptimizer from laconic.algorithms.optim, which also averages in skipped steps, or bfloat16.",
    ),
}
_AVERAGERS, _OPTIMIZER = ("PeriodicModelAverager", "HierarchicalModelAverager"), "PostLocalSGDOptimizer"
_RANK = r"(?!\S*\bis_)[\w.]*rank\w*(\([^()]*\))?"
_WORKER_0 = re.compile(rf"{_RANK} == 0|0 == {_RANK}|not {_RANK}|[\w.]*is_(main|master|rank_zero)\w*(\(\))?", re.I)


class ScriptError(ValueError):
    """The script cannot be parsed, or cannot be rewritten."""


@dataclass(frozen=True, order=True)
class ScriptChange:
    """One place in a script, what is written there, why it matters and what to do."""

    line: int
    column: int
    kind: Literal["import", "by hand", "misuse"]
    """`import`: `ParsedScript.rewritten` changes it; `by hand`: only a person can; `misuse`: see its rule."""
    rule: str
    wrote: str
    why: str
    way_out: str


def twin_of(path: str) -> str | None:
    """Return the path in laconic of a module of torch, or of a name in one; `None` if there is none.

    >>> twin_of("torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager")
    'laconic.algorithms.model_averaging.averagers.PeriodicModelAverager'
    """
    theirs = next((each for each in _TWINS if f"{path}.".startswith(f"{each}.")), None)
    return theirs and _TWINS[theirs] + path.removeprefix(theirs)


class ParsedScript:
    """A parsed script. Raises `ScriptError` with the line if Python cannot parse it."""

    def __init__(self, code: bytes, name: str = "script") -> None:
        self.code, self.name = code, name
        try:
            ast.parse(code)  # for Python's own message
            wrapper = metadata.MetadataWrapper(cst.parse_module(code), unsafe_skip_copy=True)
            self._positions = wrapper.resolve(metadata.PositionProvider)
            self._parent = wrapper.resolve(metadata.ParentNodeProvider)
            self._scopes = wrapper.resolve(metadata.ScopeProvider)
        except (SyntaxError, ValueError, RecursionError, MemoryError, cst.ParserSyntaxError) as error:
            line = getattr(error, "lineno", None) or getattr(error, "raw_line", 1)
            raise ScriptError(
                f"{name}:{line}: {getattr(error, 'msg', error)}. Only a script that Python and LibCST can parse is "
                "read; nothing was changed. Fix this line first."
            ) from error
        self._module = wrapper.module
        self._imports: list[Any] = list(m.findall(self._module, m.Import() | m.ImportFrom(relative=[])))
        plain = [alias for node in self._imports if isinstance(node, cst.Import) for alias in node.names]
        self._unaliased = [alias.evaluated_name for alias in plain if not alias.asname]
        self._calls: list[Any] = list(m.findall(self._module, m.Call()))
        assigned: Any = m.findall(self._module, m.Assign())
        self._values = [(_target(each.target), node.value) for node in assigned for each in node.targets]
        self._new: dict[Any, Any] = {}
        found = [*self._changed_imports(), *self._dotted_uses()]
        is_migrated = not found and any("laconic.algorithms" in _code(node) for node in self._imports)
        self.findings: list[ScriptChange] = sorted({*found, *self._misuses(is_migrated)})

    def rewritten(self) -> bytes:
        """Return the script with its imports changed and all else as it was."""
        if self._new and self._module.bytes != self.code:
            raise ScriptError(
                f"{self.name}: LibCST does not keep every byte of this file (form feeds, or carriage returns as line "
                "ends), so nothing was changed. Change the listed imports by hand."
            )
        return self._module.visit(_Replace(self._new)).bytes if self._new else self.code

    def _finding(self, node: Any, kind: Any, rule: str, why: str, way_out: str) -> ScriptChange:
        start = self._positions[node].start
        return ScriptChange(start.line, start.column + 1, kind, rule, _one_line(node), why, way_out)

    def _changed_imports(self) -> Iterator[ScriptChange]:
        for node in self._imports:
            is_star = isinstance(node.names, cst.ImportStar)
            names = {node.names: "*"} if is_star else {alias: alias.evaluated_name for alias in node.names}
            prefix = f"{_dotted(node.module)}." if isinstance(node, cst.ImportFrom) else ""
            twins = {alias: twin for alias, name in names.items() if (twin := twin_of(prefix + name))}
            modules = {twin.rpartition(".")[0] for twin in twins.values()}
            if twins and not prefix:
                self._new[node] = self._plain_import(node, twins)
            elif len(modules) == 1 and all(twins.get(each, "").endswith(f".{names[each]}") for each in names):
                self._new[node] = node.with_changes(module=cst.parse_expression(modules.pop()))
            elif twins:
                way_out = f"Split it. Names in laconic: {', '.join(twins.values())}"
                yield self._finding(node, "by hand", "mixed import", _WHY, way_out)
            if node in self._new:
                yield self._finding(node, "import", "import", _WHY, f"Write: {_one_line(self._new[node])}")

    def _plain_import(self, node: cst.Import, twins: dict[Any, str]) -> cst.Import:
        """`import a.b`. Without `as` it also binds `torch`: import that too, unless another import does so."""
        new = [a.with_changes(name=cst.parse_expression(twins[a])) if a in twins else a for a in node.names]
        is_bound = any(path.split(".")[0] == "torch" and not twin_of(path) for path in self._unaliased)
        if not is_bound and any(not alias.asname for alias in twins):
            new.insert(
                0, cst.ImportAlias(cst.Name("torch"), comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
            )
        return node.with_changes(names=new)

    def _dotted_uses(self) -> Iterator[ScriptChange]:
        """Paths written in full, `torch.distributed.algorithms...`, or through the name of a package."""
        changed = [f"{path}." for path in self._unaliased if twin_of(path)]
        for node in m.findall(self._module, m.Attribute()):
            path, written = self._imported_path(node), f"{_dotted(node)}"
            twin, first = twin_of(path), path.removesuffix(written.removeprefix(written.split(".")[0]))
            if twin is None or twin_of(first):
                continue  # laconic does not have it, or the import of its first name changes
            if _code(node) == written == path and any(path.startswith(module) for module in changed):
                self._new[node] = cst.parse_expression(twin)
                yield self._finding(node, "import", "dotted path", _WHY, f"Write: {twin}")
            else:
                yield self._finding(node, "by hand", "dotted path", _WHY, f"Import {twin} and use it here.")

    def _imported_path(self, node: Any) -> str:
        """The full path of a dotted name that begins with an imported name and is not a part of a longer one."""
        is_part = isinstance(self._parent[node], cst.Attribute | cst.ImportAlias | cst.ImportFrom)
        if is_part or _dotted(node) is None or node not in self._scopes:
            return ""
        names = self._scopes[node].get_qualified_names_for(node)  # type: ignore[union-attr]
        return min((name.name for name in names if name.source is metadata.QualifiedNameSource.IMPORT), default="")

    def _misuses(self, is_migrated: bool) -> Iterator[ScriptChange]:
        """Apply all rules. laconic's averagers average without gradients, and its optimizer in skipped steps."""
        yield from () if is_migrated else self._averaging_after_zero_grad()
        yield from self._different_warm_up()
        states, scalers = self._holders("PowerSGDState", "PostLocalSGDState"), self._holders("GradScaler")
        for call in filter(self._is_on_worker_0, self._calls):
            if re.search("save|dump", _name(call), re.I) and any(_holds(arg.value, states) for arg in call.args):
                yield self._misuse(call, "hook state of worker 0 only")
        optimizers = self._holders(_OPTIMIZER) if is_migrated else set()
        for call in self._called("step") if self._called(*_AVERAGERS, _OPTIMIZER, "average_parameters") else ():
            is_scaler = isinstance(call.func, cst.Attribute) and _holds(call.func.value, scalers)
            if is_scaler and call.args and not _holds(call.args[0].value, optimizers):
                yield self._misuse(call, "GradScaler with averaging")

    def _misuse(self, call: cst.Call, rule: str, *values: object) -> ScriptChange:
        return self._finding(call, "misuse", rule, _MISUSES[rule][0].format(*values), _MISUSES[rule][1])

    def _called(self, *names: str) -> list[cst.Call]:
        return [call for call in self._calls if _name(call) in names]

    def _around(self, node: Any) -> Iterator[Any]:
        """The node, its parent, and so on."""
        while node is not None:
            yield node
            node = self._parent.get(node)

    def _averaging_after_zero_grad(self) -> Iterator[ScriptChange]:
        """In a function or a loop, an average that comes after `zero_grad` with no `backward` between."""
        blocks = defaultdict(list)
        for call in self._called("backward", "zero_grad", "average_parameters"):
            keeps_zeros = _name(call) == "zero_grad" and any(_dotted(arg.value) == "False" for arg in call.args)
            if not isinstance(call.func, cst.Attribute) or keeps_zeros or self._imported_path(call.func):
                continue  # a function `average_parameters` takes all parameters
            for block in takewhile(lambda each: not isinstance(each, cst.FunctionDef), self._around(call)):
                blocks[block].append(call)
        for block, calls in blocks.items():
            for before, call in pairwise(calls * 2 if isinstance(block, cst.For | cst.While) else calls):
                if (_name(before), _name(call)) == ("zero_grad", "average_parameters"):
                    yield self._misuse(call, "averaging after zero_grad")

    def _different_warm_up(self) -> Iterator[ScriptChange]:
        states = self._called("PostLocalSGDState")
        starts = [self._setting(call, "start_localSGD_iter", 2, None) for call in states]
        for call in self._called(*_AVERAGERS) if states else ():
            warm_up = self._setting(call, "warmup_steps", 1, "0")
            if None not in (warm_up, *starts) and warm_up not in starts:
                line = self._positions[states[0]].start.line
                yield self._misuse(call, "warm-up mismatch", warm_up, " or ".join(map(str, starts)), line)

    def _setting(self, call: cst.Call, keyword: str, position: int, default: str | None) -> str | None:
        """The value of an argument as text, or the number that it is assigned; `None` if the call does not show it."""
        if any(arg.star for arg in call.args):
            return None
        given = [arg.value for arg in call.args if not arg.keyword][position : position + 1]
        given += [arg.value for arg in call.args if arg.keyword and arg.keyword.value == keyword]
        values = [value for name, value in self._values if given and name == _dotted(given[0])]
        given = values if len(values) == 1 and isinstance(values[0], cst.Integer) else given
        return _one_line(given[0]) if given else default

    def _holders(self, *classes: str) -> set[str]:
        """The names to which an object of one of these classes, or a container of one, is assigned."""
        names: set[str] = set()
        for name, value in self._values:
            is_one = isinstance(value, cst.Call) and _name(value) in classes
            names |= {name} if name and (is_one or _holds(value, names)) else set()
        return names

    def _is_on_worker_0(self, call: cst.Call) -> bool:
        """Whether a call is in the body of an `if` for rank 0."""
        pairs = pairwise(self._around(call))
        tests = [_one_line(each.test) for node, each in pairs if isinstance(each, cst.If) and node is each.body]
        return any(_WORKER_0.fullmatch(part) for test in tests for part in test.split(" and "))


class _Replace(cst.CSTTransformer):
    def __init__(self, new: dict[Any, Any]) -> None:
        super().__init__()
        self.new = new

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        return self.new.get(original_node, updated_node)


def _holds(value: Any, names: set[str]) -> bool:
    """Whether a value is, or contains, what one of the names stands for."""
    if isinstance(value, cst.Dict | cst.List | cst.Tuple):
        return any(_holds(element.value, names) for element in value.elements)
    if isinstance(value, cst.Call) and _name(value) == "state_dict":
        return isinstance(value.func, cst.Attribute) and _holds(value.func.value, names)
    return _dotted(value) in names


def _dotted(node: Any) -> str | None:
    """Return `a.b.c` as text, if the expression is nothing else."""
    above = _dotted(node.value) if isinstance(node, cst.Attribute) else None
    return f"{above}.{node.attr.value}" if above else node.value if isinstance(node, cst.Name) else None


def _target(node: Any) -> str | None:
    """Return the name that an assignment changes: `checkpoint` for `checkpoint["hook"] = state`."""
    return _dotted(node.value if isinstance(node, cst.Subscript) else node)


def _name(call: cst.Call) -> str:
    """Return the last name of what is called: `c` of `a.b.c()`."""
    func: Any = call.func.attr if isinstance(call.func, cst.Attribute) else call.func
    return func.value if isinstance(func, cst.Name) else ""


def _code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def _one_line(node: cst.CSTNode) -> str:
    """Return a statement or expression on one line, without comments."""
    is_statement = isinstance(node, cst.BaseSmallStatement)
    return ast.unparse(ast.parse(_code(node) if is_statement else f"({_code(node)})"))
