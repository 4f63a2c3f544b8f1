"""Which of torch's names have a twin, and what a name in a script stands for."""

from __future__ import annotations

import ast
from collections.abc import Iterator

TORCH = "torch.distributed.algorithms"
LACONIC = "laconic.algorithms"
TORCH_OPTIM = "torch.distributed.optim"
LACONIC_OPTIM = f"{LACONIC}.optim"

_HOOKS = ("powerSGD_hook", "post_localSGD_hook", "default_hooks", "quantization_hooks", "debugging_hooks")
_ALIASES = {
    "powerSGD": "powerSGD_hook",
    "default": "default_hooks",
    "quantization": "quantization_hooks",
    "debugging": "debugging_hooks",
}
"""Short names that torch's package gives to its own modules."""

TWINS = {
    TORCH: LACONIC,
    f"{TORCH}.ddp_comm_hooks": f"{LACONIC}.ddp_comm_hooks",
    **{f"{TORCH}.ddp_comm_hooks.{hook}": f"{LACONIC}.ddp_comm_hooks.{hook}" for hook in _HOOKS},
    **{f"{TORCH}.ddp_comm_hooks.{alias}": f"{LACONIC}.ddp_comm_hooks.{hook}" for alias, hook in _ALIASES.items()},
    f"{TORCH}.model_averaging": f"{LACONIC}.model_averaging",
    **{
        f"{TORCH}.model_averaging.{module}": f"{LACONIC}.model_averaging.{module}"
        for module in ("averagers", "hierarchical_model_averager", "utils")
    },
    f"{TORCH_OPTIM}.post_localSGD_optimizer": LACONIC_OPTIM,
}
"""Modules and packages that have a twin."""

_NAMES = {
    f"{TORCH}.ddp_comm_hooks.DDPCommHookType": f"{LACONIC}.ddp_comm_hooks.DDPCommHookType",
    f"{TORCH}.ddp_comm_hooks.register_ddp_comm_hook": f"{LACONIC}.ddp_comm_hooks.register_ddp_comm_hook",
    f"{TORCH_OPTIM}.PostLocalSGDOptimizer": f"{LACONIC_OPTIM}.PostLocalSGDOptimizer",
}
"""Names of packages, only some of whose names have a twin."""

PACKAGES = frozenset({TORCH, f"{TORCH}.ddp_comm_hooks", f"{TORCH}.model_averaging", "torch.distributed", TORCH_OPTIM})
"""What holds more than the twin has: such a name can change only where all its uses in the script can."""


def twin_of(path: str) -> str | None:
    """The twin's path of a module, or of a name in one; `None` if there is none.

    >>> twin_of("torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager")
    'laconic.algorithms.model_averaging.averagers.PeriodicModelAverager'
    >>> twin_of("torch.distributed.algorithms.join") is None
    True
    """
    if path in TWINS or path in _NAMES:
        return TWINS.get(path) or _NAMES[path]
    module, _, attribute = path.rpartition(".")
    if not module or module in PACKAGES:
        return None
    above = twin_of(module)
    return f"{above}.{attribute}" if above else None


def concerns(path: str) -> bool:
    """Whether a path is in the packages that the twin mirrors, with a twin or without."""
    return path == TORCH or path.startswith(f"{TORCH}.") or twin_of(path) is not None


def imported(tree: ast.Module) -> list[str]:
    """The dotted path of everything that a script imports."""
    paths = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return paths + list(bindings(tree).values())


def bindings(tree: ast.Module) -> dict[str, str]:
    """What each imported name of a script stands for, as a dotted path; a later import of a name wins."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return bound


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` as text, if the expression is nothing else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        above = dotted(node.value)
        return f"{above}.{node.attr}" if above else None
    return None


def full_path(node: ast.expr, bound: dict[str, str]) -> str | None:
    """The dotted path that an expression stands for, by the script's imports."""
    text = dotted(node)
    if text is None:
        return None
    first, dot, rest = text.partition(".")
    return f"{bound[first]}{dot}{rest}" if first in bound else None


def outermost_uses(tree: ast.Module) -> Iterator[ast.Attribute | ast.Name]:
    """Each dotted expression once, as long as it is: of `a.b.c`, not `a.b` and `a` again."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner and dotted(node):
            yield node
