"""Faults: their text, and what each does to a worker, through a real session."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.tools.doctor import injection
from laconic.tools.doctor.injection import FACTORY, Fault, fault, faults, read_marks
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
        ("kill", "'kill' is not a fault: write kind:worker@step"),
        ("burn:1@2", "with kind kill, stop, nan, flip or slow"),
        ("kill:-1@2", "is not a fault"),
        ("kill:1@0", "kill:1@0: steps count from 1. Write kill:1@1."),
        ("slow:1@2", "slow needs a duration. Write slow:1@2:2s."),
        ("nan:1@2:3s", "only stop and slow take a duration. Write nan:1@2."),
        ("stop:1@2:5", "is not a fault"),
    ],
)
def test_mistakes(text, words):
    with pytest.raises(ValueError) as error:
        faults(text)
    assert words in str(error.value)


class TestOneWorker:
    """A session without process group, with the observer in its environment."""

    @pytest.fixture
    def marks(self, monkeypatch, tmp_path: Path) -> Path:
        monkeypatch.setenv("LACONIC_OBSERVERS", FACTORY)
        monkeypatch.setenv("LACONIC_MARKS", str(tmp_path))
        return tmp_path

    def session(self) -> tuple[laconic.Session, nn.Module, torch.optim.Optimizer]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return laconic.attach(laconic.ddp(), model, optimizer, nonfinite="ignore"), model, optimizer

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        x, y = batch(0, 1)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def injected(self, marks: Path) -> list[str]:
        return [mark.fault for mark in read_marks(marks) if mark.fault]

    def test_without_a_variable_there_is_no_observer(self, monkeypatch):
        monkeypatch.delenv("LACONIC_INJECT", raising=False)
        assert injection.from_env() is None
        monkeypatch.setenv("LACONIC_INJECT", "slow:0@1:0s")
        assert injection.from_env() is not None
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert injection.from_env() is None, "the launcher has restarted the workers"

    def test_a_fault_is_injected_in_its_step_and_once(self, monkeypatch, marks):
        monkeypatch.setenv("LACONIC_INJECT", "slow:0@2:0.01s,slow:0@2:0.02s")
        session, model, optimizer = self.session()
        self.step(model, optimizer)
        assert self.injected(marks) == []
        self.step(model, optimizer)
        assert self.injected(marks) == ["slow:0@2:0.01s", "slow:0@2:0.02s"]
        session.detach()
        session, model, optimizer = self.session()
        for _ in range(3):
            self.step(model, optimizer)
        assert len(self.injected(marks)) == 2, "not again after another attach in the same process"

    def test_faults_of_absent_workers_are_ignored(self, monkeypatch, marks, caplog):
        monkeypatch.setenv("LACONIC_INJECT", "nan:1@1")
        _, model, optimizer = self.session()
        self.step(model, optimizer)
        assert "LACONIC_INJECT: nan:1@1 ignored, there are 1 workers." in caplog.text
        assert self.injected(marks) == []

    def test_detach_removes_the_hooks(self, monkeypatch, marks):
        monkeypatch.setenv("LACONIC_INJECT", "nan:0@1")
        session, model, optimizer = self.session()
        session.detach()
        self.step(model, optimizer)
        assert weights(model).isfinite().all()
        assert self.injected(marks) == []
        _, model, optimizer = self.session()
        self.step(model, optimizer)
        assert self.injected(marks) == ["nan:0@1"]
        assert not weights(model).isfinite().all()

    def test_a_mistake_in_the_variable_is_named(self, monkeypatch, marks):
        monkeypatch.setenv("LACONIC_INJECT", "burn:0@1")
        with pytest.raises(ValueError, match="'burn:0@1' is not a fault"):
            self.session()


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


def _stopped(worker: int) -> list[int]:
    continued: list[int] = []
    signal.signal(signal.SIGCONT, lambda number, frame: continued.append(number))
    injection.kill_or_stop(fault("stop:0@1:0.3s"))
    return continued


def test_a_stopped_worker_continues():
    assert run_workers(_stopped, 1, group=False) == [[signal.SIGCONT]]


def _train(worker: int, inject: str, wrapped: bool, nonfinite: str) -> tuple[str, list[Tensor]]:
    os.environ |= {"LACONIC_OBSERVERS": FACTORY, "LACONIC_INJECT": inject}
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
    for error, _ in run_workers(_train, 2, ("nan:1@3", wrapped, "raise")):
        assert error.startswith("NonFiniteError: step 3: worker 1 ")


def test_nan_on_one_worker_is_skipped_by_all():
    for error, trace in run_workers(_train, 2, ("nan:0@2", True, "skip")):
        assert error == ""
        assert torch.equal(trace[2], trace[1])
        assert trace[-1].isfinite().all()


@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "bare"])
def test_a_flipped_bit_is_found(wrapped):
    for error, _ in run_workers(_train, 3, ("flip:2@4", wrapped, "skip")):
        assert error.startswith("DivergedError: after step 4, worker 2 ")


@pytest.mark.parametrize("kind", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_lost_worker_is_named(kind):
    for error, _ in run_survivors(_train, 3, 1, (f"{kind}:1@3", True, "skip")).values():
        assert error.startswith("LostWorkerError: ")
        assert "worker 1 did not respond" in error


def _until_attached(worker: int, folder: str) -> object:
    os.environ |= {"LACONIC_OBSERVERS": FACTORY, "LACONIC_UNTIL": "attach", "LACONIC_MARKS": folder}
    os.environ["RANK"] = str(worker)
    model = mlp()
    try:
        laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    except SystemExit as ended:
        return ended.code
    return "attach returned"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_script_that_ends_after_attach(tmp_path, workers):
    assert run_workers(_until_attached, workers, (str(tmp_path),)) == [0] * workers
    assert sorted((mark.worker, mark.plan) for mark in read_marks(tmp_path)) == [(w, "ddp()") for w in range(workers)]
