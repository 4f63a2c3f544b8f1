"""Half-precision parameters: what their range cannot hold waits in the residual."""

from __future__ import annotations

import pytest
import torch

import laconic
from tests.session.models import assert_equal_bits, weights
from tests.session.test_void_steps import Linear
from tests.workers import run_workers


def _train(worker: int, text: str) -> tuple[float, torch.Tensor]:
    """Return the largest mean gradient, and the weights."""
    module = Linear().half()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    largest = 0.0
    with laconic.attach(laconic.plan(text), module, optimizer) as session:
        for step in range(12):
            gradients = [(4e4 * g).clamp(-6e4, 6e4) for g in module.draw(worker, step)]
            module(gradients).backward()
            session.average_gradients()
            largest = max(largest, *(float(p.grad.abs().max()) for p in module.parameters() if p.grad is not None))
            optimizer.step()
            optimizer.zero_grad()
    return largest, weights(module)


@pytest.mark.parametrize("text", ["power_sgd(rank=1)", "power_sgd(rank=2, bits=None)"])
def test_fp16_parameters_stay_finite_where_the_mean_exceeds_their_range(text):
    results = run_workers(_train, 2, (text,))
    assert [largest for largest, _ in results] == [65504.0] * 2
    assert_equal_bits([result for _, result in results])
    assert results[0][1].isfinite().all()
