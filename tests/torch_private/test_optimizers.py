"""Which steps of optimizers are running."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from laconic.torch_private.optimizers import is_nested_step, running_steps


class _Base(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


class _Derived(_Base):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


def _parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(1))


def test_a_step_that_calls_super_is_nested_inside():
    torch.optim.SGD([_parameter()])
    _Base([_parameter()])
    optimizer = _Derived([_parameter()])
    nested: list[bool] = []
    optimizer.register_step_pre_hook(lambda *_: nested.append(is_nested_step(optimizer)))
    optimizer.register_step_post_hook(lambda *_: nested.append(is_nested_step(optimizer)))
    optimizer.step()
    assert nested == [False, True, True, True, True, False]


def test_a_step_inside_that_of_another_optimizer_is_not_nested():
    outer, inner = torch.optim.SGD([_parameter()]), torch.optim.SGD([_parameter()])
    seen: list[tuple[bool, list[Optimizer]]] = []
    outer.register_step_pre_hook(lambda *_: inner.step())
    inner.register_step_pre_hook(lambda *_: seen.append((is_nested_step(inner), list(running_steps()))))
    outer.step()
    assert seen == [(False, [inner, outer])]
    assert list(running_steps()) == []
