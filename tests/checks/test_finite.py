"""`NonFiniteCheck` around an exchange with error feedback, for workers in one process."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from laconic.checks.finite import NonFiniteCheck
from laconic.codecs import ErrorFeedback, LowRank
from laconic.comm.lockstep import lockstep
from laconic.exchange import Peers, State
from tests.laws.world import same_bits

CODEC = ErrorFeedback(LowRank(rank=1))


def _average(gradients: list[Tensor], states: list[State]) -> Tensor:
    check = NonFiniteCheck("exclude")
    given = [{"w": g.clone()} for g in gradients]
    workers = enumerate(zip(given, states, strict=True))
    averages = [partial(CODEC.average, g, s, Peers(rank, 2), reuse=True) for rank, (g, s) in workers]
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
