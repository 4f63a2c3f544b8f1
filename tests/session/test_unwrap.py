"""What attach takes from a wrapper like accelerate's, and what it tells it. The real one: tests/integrations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import laconic


class Wrapper:
    """Steps as accelerate's does under a GradScaler: it takes a step that was not called for skipped."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        self.param_groups = optimizer.param_groups
        self._is_overflow = self._accelerate_step_called = False

    def step(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
            return
        original = self.optimizer.step

        def called(*args: Any) -> Any:
            self._accelerate_step_called = True
            return original(*args)

        self.optimizer.step = called  # type: ignore[assignment, method-assign]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.step = original  # type: ignore[method-assign]
        self._is_overflow, self._accelerate_step_called = not self._accelerate_step_called, False


@pytest.mark.parametrize("scaled", [True, False])
def test_a_wrapper_knows_which_steps_were_skipped(scaled: bool):
    model = nn.Linear(4, 1)
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper: Any = Wrapper(inner, scaler)
    with laconic.attach(laconic.ddp(), model, wrapper) as session:
        assert session.optimizers == [inner]
        skipped = []
        for factor in (1.0, float("inf"), 1.0):
            before = model.weight.detach().clone()
            loss = model(torch.ones(2, 4)).sum() * factor
            (loss if scaler is None else scaler.scale(loss)).backward()
            wrapper.step()
            inner.zero_grad()
            skipped.append(wrapper._is_overflow)
            assert torch.equal(before, model.weight) == wrapper._is_overflow
    assert skipped == [False, True, False]
