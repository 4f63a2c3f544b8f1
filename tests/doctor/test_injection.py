"""Faults: their text, and what each does to a worker."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic import injection
from laconic.doctor.injection import Fault, Injection, InjectionError, check_faults, fault, faults, injected_from_env
from tests.elastic.survivors import run_survivors
from tests.session.models import batch, mlp, weights
from tests.workers import run_workers

LONG = "kill:2@300,stop:1@100:5s,nan:0@50,flip:3@70,slow:1@20:2s"


def test_text_and_back():
    assert ",".join(map(str, faults(LONG))) == LONG
    assert faults(" kill:0@1 , ") == (Fault("kill", 0, 1),)
    assert fault("slow:1@20:0.5s").seconds == 0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kill", "'kill' is no fault: it is written kind:worker@step"),
        ("burn:1@2", "with kind kill, stop, nan, flip or slow"),
        ("kill:-1@2", "is no fault"),
        ("kill:1@0", "kill:1@0: steps count from 1. Write kill:1@1."),
        ("slow:1@2", "a slow worker sleeps for a time. Write it behind, such as slow:1@2:2s."),
        ("nan:1@2:3s", "only stop and slow last for a time. Write nan:1@2."),
        ("stop:1@2:5", "is no fault"),
    ],
)
def test_mistakes(text, words):
    with pytest.raises(InjectionError) as error:
        faults(text)
    assert words in str(error.value)


def test_workers_that_there_are_not(monkeypatch, caplog):
    with pytest.raises(InjectionError, match=r"kill:4@1: there is no worker 4 among 4, which count from 0 to 3."):
        check_faults(faults("kill:4@1"), 4)
    monkeypatch.setenv("LACONIC_INJECT", "nan:1@1")
    assert injected_from_env(None, {}, lambda: 1) is None
    assert "LACONIC_INJECT=nan:1@1: there are 1 workers, from 0: nan:1@1 is not made." in caplog.text


def test_nothing_asked_nothing_made(monkeypatch):
    monkeypatch.delenv("LACONIC_INJECT", raising=False)
    assert injected_from_env(None, {}, lambda: 1) is None


def test_a_fault_is_made_once(monkeypatch):
    monkeypatch.setattr(injection, "_made", set())
    monkeypatch.setenv("LACONIC_INJECT", "slow:0@1:0s")
    first = injected_from_env(None, {}, lambda: 1)
    assert first is not None
    first.before_step()
    assert injected_from_env(None, {}, lambda: 1) is None, "another attach in the same process"
    monkeypatch.setenv("LACONIC_INJECT", "slow:0@2:0s")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert injected_from_env(None, {}, lambda: 1) is None, "the launcher has started it anew"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_one_bit_of_one_weight_flips_and_stays_finite(dtype):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5, 3, dtype=dtype).t())
    before = p.detach().clone()
    injection.flip_a_bit({"empty": torch.empty(0), "p": p})
    assert (before != p).sum() == 1
    assert p.isfinite().all()
    injection.flip_a_bit({"p": p})
    assert torch.equal(before, p)


def test_a_slow_step_and_its_mark(monkeypatch, tmp_path):
    monkeypatch.setenv("LACONIC_MARKS", str(tmp_path))
    steps = iter([1, 2])
    slow = Injection(faults("slow:0@2:0.2s"), {}, lambda: step)
    for step in steps:
        begun = time.monotonic()
        slow.before_step()
        assert (time.monotonic() - begun >= 0.2) == (step == 2)
    assert '"fault": "slow:0@2:0.2s"' in (tmp_path / "faults-0.jsonl").read_text()


def _stopped(worker: int) -> float:
    begun = time.monotonic()
    injection.hurt(fault("stop:0@1:0.3s"))
    return time.monotonic() - begun


def test_stopped_for_a_while():
    [took] = run_workers(_stopped, 1, group=False)
    assert took >= 0.3


def _train(worker: int, inject: str, wrapped: bool, nonfinite: str) -> tuple[str, list[Tensor]]:
    os.environ["LACONIC_INJECT"] = inject
    module = mlp()
    model = DDP(module) if wrapped else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = [weights(module)]
    laconic.attach(laconic.ddp(), model, optimizer, timeout_s=3, nonfinite=nonfinite, verify_every=1)  # type: ignore[arg-type]
    for step in range(1, 6):
        x, y = batch(worker, step)
        F.cross_entropy(model(x), y).backward()
        try:
            optimizer.step()
        except (laconic.NonFiniteError, laconic.DivergedError, laconic.LostWorkerError) as error:
            return f"{type(error).__name__}: {error}", trace
        optimizer.zero_grad()
        trace.append(weights(module))
    return "", trace


@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "bare"])
def test_nan_in_the_gradients_before_they_are_averaged(wrapped):
    for said, _ in run_workers(_train, 2, ("nan:1@3", wrapped, "raise")):
        assert said.startswith("NonFiniteError: step 3: worker 1 brought NaN or Inf")


def test_nan_on_one_worker_is_skipped_by_all():
    for said, trace in run_workers(_train, 2, ("nan:0@2", True, "skip")):
        assert said == ""
        assert torch.equal(trace[2], trace[1])
        assert trace[-1].isfinite().all()


@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "bare"])
def test_a_flipped_bit_is_found(wrapped):
    for said, _ in run_workers(_train, 3, ("flip:2@4", wrapped, "skip")):
        assert said.startswith("DivergedError: after step 4, worker 2 holds other weights than the rest")


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_lost_worker_is_named(kind):
    for said, _ in run_survivors(_train, 3, 1, (f"{kind}:1@3", True, "skip")).values():
        assert said.startswith("LostWorkerError: ")
        assert "worker 1 did not answer" in said


def _until_attached(worker: int, folder: str) -> object:
    os.environ |= {"LACONIC_UNTIL": "attach", "LACONIC_MARKS": folder, "RANK": str(worker)}
    model = mlp()
    try:
        laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    except injection.StoppedAfterAttach as ended:
        return ended.code
    return "it went on"


def test_a_script_that_ends_after_attach(tmp_path):
    assert run_workers(_until_attached, 2, (str(tmp_path),)) == [0, 0]
    assert [path.read_text() for path in sorted(tmp_path.glob("attached-*"))] == ['{"plan": "ddp()", "workers": 2}'] * 2
