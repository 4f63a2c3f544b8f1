"""Which steps of optimizers are running and can nest; what a GradScaler writes, and when it calls a step."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from laconic.torch_private import steps
from laconic.torch_private.steps import always_call, call_as_before, is_nested_step, running_steps, scale_of


class _Plain(torch.optim.Adagrad):
    pass


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


def test_only_a_class_that_calls_super_may_nest():
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, _Plain):
        assert not steps.may_nest(kind([nn.Parameter(torch.ones(1))]))
    assert steps.may_nest(_Base([nn.Parameter(torch.ones(1))]))


def test_fused_optimizers_skip_themselves_and_what_a_scaler_wrote_is_removed():
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    assert not steps.skips_itself(optimizer) and steps.skips_itself(torch.optim.SGD([p], fused=True))
    steps.set_found_inf(optimizer, torch.zeros(()))
    steps.forget_scaling(optimizer)
    assert steps.found_inf(optimizer) is None and steps.loss_scale(optimizer) is None


def test_the_scale_is_a_tensor_that_update_changes_in_place():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    assert scale_of(scaler) is None
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p])
    scaler.scale(p.sum()).backward()
    scale = scale_of(scaler)
    assert scale is not None and scale.dim() == 0 and scale.item() == 4.0
    scaler.step(optimizer)
    scaler.update()
    assert scale_of(scaler) is scale and scale.item() == scaler.get_scale() == 8.0


class _Wrapper:
    """Passes attributes on, as wrappers of optimizers do."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside = inside
        self.param_groups = inside.param_groups

    def __getattr__(self, name: str) -> object:
        return getattr(self.inside, name)


def test_a_scaler_calls_each_step_and_nothing_else_sees_that_it_does(monkeypatch: pytest.MonkeyPatch):
    torch_step = inspect.unwrap(torch.amp.GradScaler.step)
    # Optimizers of other tests in this process may still be there.
    monkeypatch.setattr(torch.amp.GradScaler, "step", torch_step)
    monkeypatch.setattr(steps, "_optimizers", weakref.WeakSet())
    monkeypatch.setattr(steps, "_replaced", [])
    p = nn.Parameter(torch.ones(1))
    optimizer, other = torch.optim.SGD([p], lr=1.0), torch.optim.SGD([p], lr=1.0)
    seen: list[tuple[float, float]] = []
    calls: list[bool] = []

    def look(*_: object) -> None:
        found, scale = steps.found_inf(optimizer), steps.loss_scale(optimizer)
        assert found is not None and scale is not None and steps.skips_itself(optimizer)
        seen.append((float(found), float(scale)))
        steps.set_found_inf(optimizer, None)
        steps.clear_loss_scale(optimizer)

    look_hook = optimizer.register_step_pre_hook(look)
    other.register_step_pre_hook(lambda *_: calls.append(True))

    def overflow(given: object) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(p.sum()).backward()
        p.grad = torch.full((1,), torch.inf)
        scaler.step(given)  # type: ignore[arg-type]

    always_call(optimizer)
    assert not steps.skips_itself(optimizer), "Lightning and Fabric refuse to clip where this says so"
    overflow(optimizer)
    assert seen == [(1.0, 8.0)] and not steps.skips_itself(optimizer)
    overflow(other)
    assert not calls, "the steps of others are skipped as torch skips them"
    look_hook.remove()
    wrapped: list[bool] = []
    optimizer.register_step_pre_hook(lambda *_: wrapped.append(True))
    overflow(_Wrapper(optimizer))
    assert wrapped == [True]
    call_as_before(optimizer)
    assert torch.amp.GradScaler.step is torch_step
    overflow(optimizer)
    assert wrapped == [True]
