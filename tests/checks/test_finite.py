"""`NonFiniteCheck` around an exchange with error feedback, for workers in one process."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from laconic.checks.finite import NonFiniteCheck
from laconic.codecs import ErrorFeedback, LowRank
from laconic.comm.lockstep import lockstep
from laconic.exchange import Peers, State
from laconic.session.gradients import by_share
from tests.laws.world import same_bits

CODEC = ErrorFeedback(LowRank(rank=1))


def _average(gradients: list[Tensor], states: list[State]) -> Tensor:
    check = NonFiniteCheck("exclude")
    given = [{"w": g.clone()} for g in gradients]
    workers = enumerate(zip(given, states, strict=True))
    averages = [CODEC.average(g, s, Peers(rank, 2), reuse=True) for rank, (g, s) in workers]
    ends = lockstep([check.watch(g, each) for g, each in zip(given, averages, strict=True)])
    return ends[0].mean["w"].double()


def test_excluding_a_worker_does_not_scale_the_residuals() -> None:
    states: list[State] = [{}, {}]
    generator = torch.Generator().manual_seed(0)
    truth = delivered = torch.zeros(24, 20, dtype=torch.float64)
    for step in range(12):
        gradients = [torch.randn(24, 20, generator=generator) for _ in states]
        if step in (3, 7):
            gradients[1][2, 3] = torch.nan
        finite = [g.double() for g in gradients if g.isfinite().all()]
        truth = truth + torch.stack(finite).mean(0)
        delivered = delivered + _average(gradients, states)
    residual = torch.stack([state["residual"]["w"].double() for state in states]).mean(0)
    torch.testing.assert_close(delivered + residual, truth, rtol=0, atol=1e-4)


def test_a_step_without_a_finite_worker_changes_no_state() -> None:
    states: list[State] = [{}, {}]
    _average([torch.ones(24, 20), torch.eye(24, 20)], states)
    before = [{name: t.clone() for name, t in state["residual"].items()} for state in states]
    mean = _average([torch.full((24, 20), torch.nan)] * 2, states)
    assert not mean.isfinite().any()
    assert all(same_bits(state["residual"], was) for state, was in zip(states, before, strict=True))


def test_finite_workers_that_have_counted_nothing_leave_no_mean(caplog: pytest.LogCaptureFixture) -> None:
    """Under "exclude": the only worker with samples has NaN, so the step is void, and the log leaves nobody out."""
    states: list[State] = [{}, {}]
    _average([torch.ones(24, 20), torch.eye(24, 20)], states)
    before = [state["residual"]["w"].clone() for state in states]
    given = [{"w": torch.zeros(24, 20)}, {"w": torch.full((24, 20), torch.nan)}]
    exchanges = []
    for rank, share in enumerate((0.0, 2.0)):
        average = CODEC.average(given[rank], states[rank], Peers(rank, 2), reuse=True)
        weighed = by_share(given[rank], share, states[rank], average)
        exchanges.append(NonFiniteCheck("exclude").watch(given[rank], weighed, share))
    with caplog.at_level(logging.WARNING, "laconic"):
        ends = lockstep(exchanges)
    assert not any(bool(end.finite()) for end in ends)
    assert "left out" not in caplog.text
    assert all(same_bits(state["residual"]["w"], was) for state, was in zip(states, before, strict=True))
