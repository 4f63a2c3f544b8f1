"""What a GradScaler writes on an optimizer, and which steps can nest; the model inside a compiled one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from laconic.torch_private import steps
from laconic.torch_private.compiled import inside_compiled


class _Plain(torch.optim.Adagrad):
    pass


class _Derived(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


def test_only_a_class_that_calls_super_may_nest():
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, _Plain):
        assert not steps.may_nest(kind([nn.Parameter(torch.ones(1))]))
    assert steps.may_nest(_Derived([nn.Parameter(torch.ones(1))]))


def test_fused_optimizers_skip_themselves_and_what_a_scaler_wrote_is_removed():
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    assert not steps.skips_itself(optimizer) and steps.skips_itself(torch.optim.SGD([p], fused=True))
    steps.set_found_inf(optimizer, torch.zeros(()))
    steps.forget_scaling(optimizer)
    assert steps.found_inf(optimizer) is None and steps.loss_scale(optimizer) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_model_inside_a_compiled_one():
    model = nn.Linear(2, 2)
    assert inside_compiled(torch.compile(model)) is model  # type: ignore[arg-type]
    assert inside_compiled(model) is None
