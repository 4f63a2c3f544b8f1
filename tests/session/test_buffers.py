"""Buffers under DDP: what DDP would broadcast, the session does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import listen, run_workers


class Normed(nn.Module):
    """BatchNorm, and buffers of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(32), mlp()
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("mask", torch.full((4,), -torch.inf))
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("ema", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(5, dtype=torch.bool))
        self.phase: Tensor
        self.ema: Tensor
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("phase").add_(x.mean() * (1 + 2j))
        self.ema = self.get_buffer("ema") + x.sum()  # rebound in each forward
        self.get_buffer("seen")[int(x.sum().abs()) % 5 if x.sum().isfinite() else 0] = True
        result: Tensor = self.body(self.norm(x))
        return result


def _buffers(module: nn.Module) -> Tensor:
    return torch.cat([torch.view_as_real(b).reshape(-1) if b.is_complex() else b.reshape(-1).double()
                      for b in module.buffers()])  # fmt: skip


def _train(worker: int, text: str | None, broadcasts: bool = True, bad: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """Train; without a plan, with DDP alone. The inputs of `bad` workers are NaN in step 2."""
    said = listen()
    module = Normed()
    ddp = DDP(module)
    ddp.broadcast_buffers = broadcasts
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2, momentum=0.5)
    session = None if text is None else laconic.attach(laconic.plan(text), ddp, optimizer)
    trace = []
    for step in range(4):
        x, y = batch(worker, step)
        if step == 2 and worker in bad:
            x[0] = torch.nan
        F.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if session is not None:
            trace.append(_buffers(module).clone())
    ddp(batch(worker, 9)[0])  # where DDP itself broadcasts
    if session is not None:
        inside = ddp.broadcast_buffers
        session.detach()
        totals = session.ledger.totals(by="phase").get("buffers")
        return weights(module), trace, totals, (inside, ddp.broadcast_buffers), said
    return weights(module), _buffers(module)


@pytest.mark.parametrize("text", ["ddp()", "power_sgd(rank=2)"])
def test_all_workers_have_the_first_workers_buffers_after_each_step(text):
    results = run_workers(_train, 3, (text,))
    for step in range(4):
        assert_equal_bits([trace[step] for _, trace, *_ in results])
    size = sum(b.nbytes for b in Normed().buffers())
    for worker, (_, _, totals, flags, said) in enumerate(results):
        assert flags == (False, True) and not said
        sends = 2 if worker == 0 else 0  # of three workers, the first sends to both others
        assert (totals.payload_bytes, totals.wire_bytes) == (4 * (size + 1), 4 * sends * (size + 1))


def test_weights_and_buffers_are_those_of_ddp_alone():
    ours, ddps = run_workers(_train, 2, ("ddp()",)), run_workers(_train, 2, (None,))
    assert_equal_bits([*(result[0] for result in ours), *(result[0] for result in ddps)])


def test_nothing_is_sent_if_ddp_was_told_not_to():
    results = run_workers(_train, 2, ("ddp()", False))
    assert [(totals, flags) for _, _, totals, flags, _ in results] == [(None, (False, False))] * 2
    assert not torch.equal(results[0][1][-1], results[1][1][-1])


def test_rounds_of_weights_broadcast_no_buffers():
    assert [result[2] for result in run_workers(_train, 2, ("post_local_sgd(period=2)",))] == [None, None]


@pytest.mark.parametrize(
    ("bad", "source"),
    [((0,), 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in [((1,), 0), ((0, 1), 2), ((0, 1, 2), None)])],
)
def test_nan_does_not_spread(bad, source):
    results = run_workers(_train, 3, ("ddp()", True, bad))
    for _, trace, _, _, said in results:
        warned = [text for text in said if "buffers" in text]
        if source is None:
            assert "and so have those of all others. All keep their own." in warned[0]
            continue
        assert not trace[2].isnan().any() and not trace[3].isnan().any()
        expected = f"step 3: the buffers of worker 0 have NaN or Inf. All workers take those of worker {source}."
        assert warned == ([expected] if source else [])
    if source is not None:
        assert_equal_bits([trace[2] for _, trace, *_ in results])
