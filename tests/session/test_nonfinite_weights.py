"""NaN on one worker reaches no other: in averaged weights, moments, buffers and fragments in flight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import laconic
from tests.session.models import assert_equal_bits, weights
from tests.workers import run_workers


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(4))
        self.register_buffer("statistics", torch.ones(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))  # by design
        self.statistics: Tensor


def _step(model: _Model, optimizer: torch.optim.Optimizer, gradient: float = 1.0) -> None:
    model.a.grad, model.b.grad = torch.full((6,), gradient), torch.full((4,), gradient)
    optimizer.step()


def _between_rounds(worker: int, how: str) -> Tensor:
    model = _Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = laconic.attach(laconic.plan("Plan(schedule=Every(8))"), model, optimizer)
    for _ in range(3):
        _step(model, optimizer, gradient=float(worker))
    if worker == 1:
        model.a.data[0] = torch.nan
        model.statistics[1] = torch.inf
    if how == "change":
        session.change(laconic.ddp())
    else:
        session.average_weights()
    return torch.cat([weights(model), model.statistics])


@pytest.mark.parametrize("how", ["average_weights", "change"])
def test_weights_averaged_between_rounds(how):
    results = run_workers(_between_rounds, 3, (how,))
    assert_equal_bits(results)
    torch.testing.assert_close(results[0][:10], torch.full((10,), 0.7))  # workers 0 and 2: 1 and 1 - 3 * 0.2
    torch.testing.assert_close(results[0][10:], torch.ones(3))


def _moments(worker: int, poisoned: str) -> tuple[Tensor, Tensor, Tensor]:
    model = _Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    laconic.attach(laconic.plan("Plan(schedule=Every(2), optimizer_state='average')"), model, optimizer)
    _step(model, optimizer, gradient=1.0 + worker)
    if worker == 1 and poisoned == "moments":
        optimizer.state[model.a]["exp_avg"][0] = torch.nan
    if worker == 1 and poisoned == "buffers":
        model.statistics[0] = torch.nan
    _step(model, optimizer, gradient=1.0 + worker)
    return weights(model), optimizer.state[model.a]["exp_avg"], model.statistics


@pytest.mark.parametrize("poisoned", ["moments", "buffers"])
def test_moments_and_buffers_of_the_culprit_are_not_averaged(poisoned):
    results = run_workers(_moments, 2, (poisoned,))
    for part in range(3):
        assert_equal_bits([result[part] for result in results])
    torch.testing.assert_close(results[0][1], torch.full((6,), 0.19))  # worker 0's own: 0.1, then 0.9 * 0.1 + 0.1
    torch.testing.assert_close(results[0][2], torch.ones(3))


def _leader(worker: int) -> Tensor:
    model = _Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    laconic.attach(laconic.plan("Plan(schedule=Every(2), buffers='leader')"), model, optimizer)
    model.statistics.fill_(worker)
    if worker == 0:
        model.statistics[0] = torch.nan
    for _ in range(2):
        _step(model, optimizer)
    return model.statistics


def test_the_leader_is_the_first_worker_with_finite_buffers():
    assert [each.tolist() for each in run_workers(_leader, 3)] == [[1.0] * 3] * 3


STREAMING = [
    pytest.param("streaming_diloco(period=4, fragments=1, delay=1)", marks=pytest.mark.slow),
    "streaming_diloco(period=4, fragments=2, delay=1)",
    pytest.param("streaming_diloco(period=4, fragments=2)", marks=pytest.mark.slow),
    "Plan(schedule=Streaming(period=4, fragments=2))",
]


def _streaming(worker: int, text: str, poisoned: str) -> list[Tensor]:
    model = _Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    laconic.attach(laconic.plan(text), model, optimizer)
    seen = []
    for step in range(16):
        if step == 1 and worker == 1:
            for name in poisoned:
                getattr(model, name).data[0] = torch.nan
        _step(model, optimizer)
        seen.append(weights(model))
    return seen


@pytest.mark.parametrize("text", STREAMING)
def test_streaming_with_a_culprit(text):
    healthy, culprit = run_workers(_streaming, 2, (text, "ab"))
    assert all(each.tolist() == [1.0] * 10 for each in healthy)
    assert all(each.tolist() == [1.0] * 10 for each in culprit[5:])


@pytest.mark.parametrize("poisoned", ["a", "b"])
def test_nan_in_one_fragment_is_found_at_its_turn(poisoned):
    healthy, culprit = run_workers(_streaming, 2, (STREAMING[1], poisoned))
    assert all(each.tolist() == [1.0] * 10 for each in healthy)
    assert all(each.tolist() == [1.0] * 10 for each in culprit[6:])
