"""Validation while a run goes on: on averaged weights, without a trace in training, bytes or time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.tools.compare.reporter import (
    CompareReporter,
    Validator,
    control_group,
    mean_over,
    mean_weights,
)
from laconic.tools.compare.runs import Goal, read_reports, validation_points, write_goal
from tests.session.models import weights
from tests.workers import run_workers

PLANS = [
    "Plan(Every(8))",
    "streaming_diloco(period=4, fragments=2, lr=0.7, momentum=0.9, codec=Exact())",
    "ddp()",
    "alone()",
]
WATCHED = [
    "Plan(Every(4), ErrorFeedback(Cast('bf16')))",
    "streaming_diloco(period=3, fragments=1, lr=0.5, momentum=0.5, codec=Exact())",
    "alone()",
]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int) -> None:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + worker))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _everything(model: nn.Module) -> Tensor:
    return torch.cat([weights(model), *(b.reshape(-1).float() for b in model.buffers())])


def _averaged(worker: int) -> dict[str, tuple[Tensor, Tensor, Tensor, int]]:
    return {text: _averaged_under(text, worker) for text in PLANS}


def _averaged_under(text: str, worker: int) -> tuple[Tensor, Tensor, Tensor, int]:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = laconic.attach(laconic.plan(text), model, optimizer)
    for step in range(3):
        _step(model, optimizer, worker, step)
    own, sent = _everything(model), session.ledger.wire_bytes
    with mean_weights(session, control_group(dist.group.WORLD)):
        inside = _everything(model)
    return own, inside, _everything(model), session.ledger.wire_bytes - sent


def test_the_mean_of_all_weights_and_then_each_workers_own() -> None:
    by_worker = run_workers(_averaged, 3)
    for text in PLANS:
        results = [found[text] for found in by_worker]
        mean = torch.stack([own for own, _, _, _ in results]).double().mean(0).float()
        for own, inside, after, sent in results:
            assert torch.equal(own, after)
            assert sent == 0
            if text in ("ddp()", "alone()"):
                assert torch.equal(inside, own)
            else:  # without num_batches_tracked, the last buffer, which is no floating-point number
                assert torch.allclose(inside[:-1], mean[:-1], atol=1e-6)
                assert not torch.equal(inside, own)


def _trained(worker: int, folder: str) -> list[tuple[Tensor, Tensor]]:
    """The end of each training without a reporter, and with one."""
    folders = [Path(folder, str(index)) for index in range(len(WATCHED))]
    return [
        (_validated(worker, None, text), _validated(worker, where, text))
        for text, where in zip(WATCHED, folders, strict=True)
    ]


def _validated(worker: int, folder: Path | None, text: str) -> Tensor:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = laconic.attach(laconic.plan(text), model, optimizer)
    if folder is not None:
        session.observe(CompareReporter(folder))

    def validation() -> float:
        model.eval()
        with torch.no_grad():
            loss = float(model(torch.ones(1, 8)).square())
        model.train()
        return loss + worker

    with session:
        for step in range(6):
            _step(model, optimizer, worker, step)
            session.report(loss=0.5, validation=validation)
    return _everything(model)


@pytest.mark.slow
def test_training_does_not_notice(tmp_path: Path) -> None:
    for index in range(len(WATCHED)):
        (tmp_path / str(index)).mkdir()
        write_goal(tmp_path / str(index), Goal(steps=6, validate_every=3), computed=None)
    for found in run_workers(_trained, 2, (str(tmp_path),)):
        assert all(torch.equal(quiet, watched) for quiet, watched in found)
    for index, text in enumerate(WATCHED):
        reports = [read_reports(tmp_path / str(index), worker) for worker in range(2)]
        points = validation_points(reports[0])
        # not while a fragment is in flight, after step 3
        assert [point.step for point in points] == ([4, 6] if "streaming" in text else [3, 6])
        assert [each.validation for each in reports[0]] == [each.validation for each in reports[1]]
        assert all(point.loss > 0.5 for point in points)  # the mean over the workers


def test_the_clock_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 17.0, 30.0, 31.0])
    monkeypatch.setattr("laconic.tools.compare.reporter.time.perf_counter", lambda: next(now))
    model = _net()
    with laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        validate = Validator(every=1, control=None, replicas=None)
        assert [validate(session, lambda: 2.0, last=False) for _ in range(2)] == [2.0, 2.0]
    assert validate.paused_s == 8.0


def test_a_value_is_taken_as_it_is() -> None:
    model = _net()
    with laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        validate = Validator(every=5, control=None, replicas=None)
        assert validate(session, None, last=True) is None
        assert validate(session, torch.tensor(0.5), last=False) == 0.5
        assert [validate(session, lambda: 2.0, last=step == 7) for step in range(1, 8)] == [None] * 4 + [2.0, None, 2.0]
    assert mean_over(None, 1.0, 2.0) == (1.0, 2.0)
