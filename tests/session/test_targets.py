"""Targets of bytes at `attach`: every worker resolves them alike, and the session goes on with what they became."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic import DisagreementError, frugal, power_sgd, streaming_diloco
from laconic.session.live_model import facts_of_model
from tests.workers import run_workers


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.BatchNorm1d(64), nn.Linear(64, 40))


def _attached(plan: Any, model: nn.Module | None = None, **options: Any) -> laconic.Session:
    model = _model() if model is None else model
    return laconic.attach(plan, model, torch.optim.AdamW(model.parameters()), **options)


def _step(session: laconic.Session, model: nn.Module) -> None:
    x: Tensor = model(torch.randn(8, 48))
    x.square().mean().backward()
    session.optimizers[0].step()
    session.optimizers[0].zero_grad()


def _bytes_of_two_rounds(worker: int, text: str) -> tuple[str, str, float, int]:
    model = _model()
    with _attached(text, model) as session:
        plan = session.plan
        for _ in range(2 * plan.schedule.period):
            _step(session, model)
        phases = session.ledger.totals(by="phase")
        sent = sum(total.wire_bytes for phase, total in phases.items() if phase in ("gradient", "weights"))
        numbers = sum(p.numel() for p in model.parameters())
        return repr(plan), repr(session.given), sent / session.step, 2 * 4 * numbers * 2 // 3


@pytest.mark.parametrize("text", ["frugal('5x')", "frugal('40x')", "frugal('50x', delay=2)", "power_sgd(bytes='12x')"])
def test_the_ledger_has_so_many_times_fewer_bytes_with_those_of_buffers(text: str) -> None:
    results = run_workers(_bytes_of_two_rounds, 3, (text,))
    plan, given, sent, ddp_bytes = results[0]
    assert [each[:2] for each in results] == [(plan, given)] * 3
    assert given == repr(laconic.plan(text)) != plan
    assert ddp_bytes / sent >= laconic.plan(text).choose.keywords["times"]  # type: ignore[attr-defined]


def test_a_session_says_what_a_target_became(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "laconic")
    with _attached("frugal('60x')") as session:
        became = session.plan
        assert session.given == frugal("60x")
        assert became == frugal("60x").resolved(facts_of_model(_model(), session.optimizers, 1))
        assert f"frugal(bytes='60x') is {became!r}: " in caplog.text
        assert caplog.text.count("times fewer bytes than ddp()") == 1
        assert session.state_dict()["plan"] == repr(became)
    with _attached(became) as session:
        assert session.plan is session.given is became
        assert "given" not in session.state_dict()


def test_a_session_changes_to_a_target() -> None:
    with _attached(laconic.ddp()) as session:
        session.change(power_sgd(bytes="10x"))
        assert session.given == power_sgd(bytes="10x")
        assert session.plan == power_sgd(bytes="10x").resolved(facts_of_model(_model(), session.optimizers, 1))
        with pytest.raises(ValueError, match=r"power_sgd\(bytes='500x'\): even rank 1 sends only"):
            session.change(power_sgd(bytes="500x"))
        assert session.given == power_sgd(bytes="10x")


def test_a_resumed_run_goes_on_with_the_plan_that_was_saved() -> None:
    with _attached("frugal('60x')") as session:
        saved, became = session.state_dict(), session.plan
    with _attached("frugal('60x')") as session:  # as if saved among another number of workers
        session.load_state_dict(saved | {"plan": "streaming_diloco(period=9, fragments=4, delay=0)"})
        assert session.plan == streaming_diloco(period=9, delay=0) != became
        assert session.given == frugal("60x")
    for other in ("frugal('61x')", "streaming_diloco(period=9, delay=0)"):
        with _attached(other) as session, pytest.raises(ValueError, match="this state was saved under"):
            session.load_state_dict(saved | {"plan": "streaming_diloco(period=7, fragments=4, delay=0)"})
    with _attached(became) as session:
        session.load_state_dict(saved)


def _refused(worker: int, text: str, differs: bool) -> str:
    model = nn.Sequential(nn.Linear(48, 64), *[nn.Linear(64, 64) for _ in range(worker * differs)])
    try:
        _attached(text, model)
    except (ValueError, DisagreementError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_target_that_cannot_be_met_is_refused_on_all_workers_alike() -> None:
    first, second = run_workers(_refused, 2, ("power_sgd(bytes='400x')", False))
    assert first == second
    assert first.startswith("ValueError: power_sgd(bytes='400x'): even rank 1 sends only")


def test_models_that_differ_are_named() -> None:
    for error in run_workers(_refused, 2, ("frugal('60x')", True)):
        assert error.startswith("DisagreementError: the workers disagree about what is attached: ")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("AdamW", "adaptive"), ("SGD", "sgd"), ("Muon", "muon"), ("SGDMuon", "muon"), ("Lion", "adaptive")],
)
def test_the_kind_of_an_optimizer(name: str, kind: str) -> None:
    model = _model()
    optimizer = type(name, (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    facts = facts_of_model(model, [optimizer], 4)
    assert (facts.optimizers, facts.workers) == ((kind,), 4)
    assert facts.buffers.keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_frozen_parameters_do_not_count() -> None:
    model = _model()
    model[0].requires_grad_(False)
    facts = facts_of_model(model, [], 2)
    assert facts.tensors.keys() == {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert facts.ddp_bytes == 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
