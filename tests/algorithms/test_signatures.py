"""The twin has torch's names, signatures and slots, so that only the package in an import changes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.algorithms.implementations import PACKAGES, module

MODULES = [
    "ddp_comm_hooks",
    "ddp_comm_hooks.default_hooks",
    "ddp_comm_hooks.debugging_hooks",
    "ddp_comm_hooks.post_localSGD_hook",
    "ddp_comm_hooks.powerSGD_hook",
    "ddp_comm_hooks.quantization_hooks",
    "model_averaging.averagers",
    "model_averaging.hierarchical_model_averager",
    "model_averaging.utils",
    "optim",
]


def _public(name: str) -> list[str]:
    """Return the public names of torch's module."""
    if name == "optim":
        return ["PostLocalSGDOptimizer"]
    theirs = module("torch", name)
    own = [n for n, v in vars(theirs).items() if getattr(v, "__module__", None) == theirs.__name__ and n[0] != "_"]
    return sorted(getattr(theirs, "__all__", own))


NAMES = [(name, public) for name in MODULES for public in _public(name)]


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def _check_signature(ours: Any, theirs: Any, what: str) -> None:
    """Check that ours has the same parameters, order and defaults; it may have more, with a default or by keyword."""
    our_parameters, their_parameters = _parameters(ours), _parameters(theirs)
    assert our_parameters[: len(their_parameters)] == their_parameters, what
    for name, kind, default in our_parameters[len(their_parameters) :]:
        assert kind is inspect.Parameter.KEYWORD_ONLY or default is not inspect.Parameter.empty, f"{what}: {name}"


def test_the_list_is_not_empty():
    assert len(NAMES) >= 20
    assert {"PowerSGDState", "HierarchicalModelAverager", "PostLocalSGDOptimizer"} <= {name for _, name in NAMES}


@pytest.mark.parametrize(("name", "public"), NAMES, ids=[f"{name}.{public}" for name, public in NAMES])
def test_signatures_are_torchs(name, public):
    ours, theirs = getattr(module("laconic", name), public), getattr(module("torch", name), public)
    if not inspect.isclass(theirs) or public == "DDPCommHookType":
        if public != "DDPCommHookType":
            _check_signature(ours, theirs, public)
        return
    _check_signature(ours.__init__, theirs.__init__, f"{public}.__init__")
    for method, value in vars(theirs).items():
        if inspect.isfunction(value) and not method.startswith("_"):
            _check_signature(getattr(ours, method), value, f"{public}.{method}")
    if "__slots__" in vars(theirs):
        assert list(ours.__slots__) == list(vars(theirs)["__slots__"])


@pytest.mark.parametrize("name", MODULES)
def test_only_the_package_changes_in_an_import(name):
    names = ", ".join(_public(name))
    package = "torch.distributed" if name == "optim" else PACKAGES["torch"]
    line = f"from {package}.{name} import {names}"
    ours: dict[str, Any] = {}
    exec(line.replace(package, PACKAGES["laconic"]), ours)  # noqa: S102 - the line above
    for public in _public(name):
        assert ours[public].__module__.startswith("laconic.")
    assert getattr(module("laconic", name), "__all__", _public(name))
