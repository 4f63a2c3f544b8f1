"""What steps of optimizers count as: subclasses, several optimizers, optimizers that `attach` was not given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import run_workers


class _Sub(torch.optim.SGD):
    """Calls `super().step()`, and fails when asked to."""

    fails = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if self.fails:
            raise ArithmeticError


def _subclass(worker: int, text: str) -> tuple[int, Tensor, Tensor]:
    if worker == 0:
        torch.optim.SGD([nn.Parameter(torch.ones(1))])  # so that hooks fire inside super().step() here, and only here
    module = mlp()
    optimizer = _Sub(module.parameters(), lr=0.1)
    session = laconic.attach(laconic.plan(text), module, optimizer)
    for step in range(8):
        x, y = batch(worker, step)
        F.cross_entropy(module(x), y).backward()
        if step == 4:  # a step that raises did not happen; it is taken again with no gradient left of the first try
            before = [p.detach().clone() for p in module.parameters()]
            optimizer.fails = True
            with pytest.raises(ArithmeticError):
                optimizer.step()
            optimizer.fails = False
            with torch.no_grad():
                for p, old in zip(module.parameters(), before, strict=True):
                    p.copy_(old)
        optimizer.step()
        optimizer.zero_grad()
    return session.step, weights(module), _oracle(text.startswith("ddp"), dist_workers=2)


def _oracle(gradients: bool, dist_workers: int) -> Tensor:
    """The same training in one process: every step's mean gradient, or weights averaged after steps 4 and 8."""
    replicas = [mlp() for _ in range(dist_workers)]
    for step in range(8):
        for worker, module in enumerate(replicas):
            x, y = batch(worker, step)
            module.zero_grad()
            F.cross_entropy(module(x), y).backward()
        with torch.no_grad():
            for params in zip(*(module.parameters() for module in replicas), strict=True):
                mean = torch.stack([p.grad for p in params if p.grad is not None]).mean(0)
                for p in params:
                    assert p.grad is not None
                    p.sub_(mean if gradients else p.grad, alpha=0.1)
                if not gradients and step % 4 == 3:
                    average = torch.stack(params).mean(0)
                    for p in params:
                        p.copy_(average)
    return weights(replicas[0])


@pytest.mark.parametrize("text", ["ddp()", "post_local_sgd(period=4)"])
def test_a_step_that_calls_super_counts_once(text):
    results = run_workers(_subclass, 2, (text,))
    assert [steps for steps, _, _ in results] == [8, 8]
    assert_equal_bits([got for _, got, _ in results])
    torch.testing.assert_close(results[0][1], results[0][2], rtol=1e-5, atol=1e-6)
