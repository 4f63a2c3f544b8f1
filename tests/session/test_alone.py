"""`alone()`: nothing is sent after the handshake. Weights at every step: what `Every(1, of="weights")` averages."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import run_workers

STEPS, SAVED_AT = 6, 3


def _net() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(32), mlp())


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, steps: range) -> None:
    for step in steps:
        x, y = batch(worker, step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def _by_itself(worker: int) -> tuple[Tensor, Tensor]:
    model = _net()
    _train(model, torch.optim.AdamW(model.parameters()), worker, range(STEPS))
    return weights(model), model.state_dict()["0.running_mean"]


def _attached(kind: str) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, laconic.Session]:
    module = _net()
    model = module if kind == "bare" else DDP(module, static_graph=kind == "static")
    optimizer = torch.optim.AdamW(model.parameters())
    return module, model, optimizer, laconic.attach(laconic.alone(), model, optimizer)


def _alone(worker: int) -> list[dict[str, Any]]:
    found = []
    for kind in ("bare", "ddp", "static"):
        module, model, optimizer, session = _attached(kind)
        sent = session.ledger.wire_bytes
        _train(model, optimizer, worker, range(SAVED_AT))
        saved = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "session": session.state_dict()}
        saved = copy.deepcopy(saved)
        _train(model, optimizer, worker, range(SAVED_AT, STEPS))
        one = {"weights": weights(module), "mean": module.state_dict()["0.running_mean"].clone()}
        one["sent"] = session.ledger.wire_bytes - sent
        session.average_weights()
        one["averaged"] = weights(module)
        session.detach()
        module, model, optimizer, session = _attached(kind)
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        session.load_state_dict(saved["session"])
        _train(model, optimizer, worker, range(SAVED_AT, STEPS))
        one["resumed"] = weights(module)
        session.detach()
        found.append(one)
    return found


def test_each_worker_trains_as_if_there_were_no_other() -> None:
    by_itself = run_workers(_by_itself, 2)
    assert not torch.equal(by_itself[0][0], by_itself[1][0])
    for worker, found in enumerate(run_workers(_alone, 2)):
        for one in found:
            assert one["sent"] == 0
            assert torch.equal(one["weights"], by_itself[worker][0])
            assert torch.equal(one["mean"], by_itself[worker][1])  # buffers stay each worker's own
            assert torch.equal(one["resumed"], one["weights"])
            assert torch.allclose(one["averaged"], (by_itself[0][0] + by_itself[1][0]) / 2, atol=1e-6)


def _stopped(worker: int) -> int:
    _, model, optimizer, session = _attached("ddp")
    session.stop_on(signal.SIGUSR1)
    for step in range(STEPS):
        if worker == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        _train(model, optimizer, worker, range(step, step + 1))
        if session.should_stop:
            break
    return session.step


def test_each_worker_stops_for_itself() -> None:
    assert run_workers(_stopped, 2) == [STEPS, 3]


def _every_step(worker: int, text: str) -> tuple[Tensor, Tensor, list[str]]:
    module = mlp()
    model = DDP(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = laconic.attach(laconic.plan(text), model, optimizer)
    _train(model, optimizer, worker, range(STEPS))
    return weights(module), _sgd_of_all(2), sorted({str(entry.phase) for entry in session.ledger.entries})


def _sgd_of_all(workers: int) -> Tensor:
    """SGD on the mean gradient: for SGD, averaging weights at every step is the same."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for worker in range(workers):
            x, y = batch(worker, step)
            (F.cross_entropy(model(x), y) / workers).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("codec", ["Exact()", "ErrorFeedback(Cast('bf16'))"])
def test_weights_at_every_step(codec: str) -> None:
    results = run_workers(_every_step, 2, (f"Plan(Every(1, of='weights'), {codec})",))
    assert_equal_bits([found for found, _, _ in results])
    found, expected, phases = results[0]
    assert torch.allclose(found, expected, atol=1e-5 if codec == "Exact()" else 2e-3)
    assert "weights" in phases and "gradient" not in phases
