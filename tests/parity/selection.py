"""Select the upstream tests by the names that their code uses, so that the list follows the installed torch.

A test is selected if it, or a helper method that it calls, uses one of the replaced modules or registers a
communication hook. The bytecode is read, not run.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from tests.parity.twin import REPLACED_MODULES

REGISTRATION = frozenset({"register_comm_hook", "register_ddp_comm_hook"})


def tests_of(upstream: Any, modules: frozenset[ModuleType]) -> tuple[str, ...]:
    """Return the sorted names of the tests in `upstream` that use `modules` or register a hook."""
    holder = upstream.DistributedTest._DistTestBase
    names = frozenset(name for name, value in vars(upstream).items() if _is_one_of(value, modules))
    tests = (name for name in dir(holder) if name.startswith("test_"))
    return tuple(sorted(test for test in tests if _names_used(holder, test, set()) & (names | REGISTRATION)))


def _is_one_of(value: object, modules: frozenset[ModuleType]) -> bool:
    return isinstance(value, ModuleType) and value in modules


def _names_used(holder: type, name: str, seen: set[str]) -> frozenset[str]:
    """Return global names, attributes and imported modules of a method and of the methods that it calls."""
    method = inspect.getattr_static(holder, name, None)
    if name in seen or not inspect.isfunction(method):
        return frozenset()
    seen.add(name)
    used = frozenset(_names_in(inspect.unwrap(method).__code__))
    return used.union(*(_names_used(holder, other, seen) for other in used if other in vars(holder)))


def _names_in(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in {"LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD"}:
            yield str(instruction.argval)
        if instruction.opname == "IMPORT_NAME" and instruction.argval in REPLACED_MODULES:
            yield "register_comm_hook"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
