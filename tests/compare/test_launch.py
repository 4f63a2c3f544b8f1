"""Workers in real processes: what fails is named, and nothing is ever left running."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from laconic.compare.launch import Stopped, WorkerError, check_port, launch, stoppable
from laconic.compare.settings import LabError, Settings
from tests.compare.processes import descendants, eventually, process_table

ROOT = Path(__file__).parents[2]
TINY = Settings(plan="ddp()", workers=2, steps=3, layers=1, width=16, heads=1, context=16)
LONG = ["train", "--workers", "2", "--steps", "100000", "--layers", "1", "--width", "16", "--heads", "1"]

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc to find processes")


@pytest.fixture
def training() -> Iterator[subprocess.Popen[str]]:
    """A `laconic train` that has begun to train and would go on for hours."""
    command = [sys.executable, "-m", "laconic", *LONG]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("worker ")
            yield process
        finally:
            process.kill()


def test_a_run_ends_with_an_outcome_and_no_processes(tmp_path):
    before = set(multiprocessing.active_children())
    outcome = launch(TINY, tmp_path)
    assert (outcome.plan, outcome.steps, outcome.workers) == ("ddp()", 3, 2)
    assert outcome.sent_bytes == 3 * 4 * outcome.parameters + 24  # 24 for the handshake
    assert outcome.loss_final < outcome.loss_start
    assert set(multiprocessing.active_children()) == before
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_worker_that_dies_at_start_is_named_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchlink")
    before = set(multiprocessing.active_children())
    with pytest.raises(WorkerError, match=r"worker \d of 2 died at start, with plan ddp\(\): .*nosuchlink"):
        launch(TINY, tmp_path)
    assert set(multiprocessing.active_children()) == before


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything(training, number):
    family = descendants(training.pid)
    assert len(family) >= 2
    training.send_signal(number)
    _, errors = training.communicate(timeout=60)
    assert training.returncode == 128 + number
    assert errors == f"laconic: stopped by {number.name}; no worker is left behind.\n"
    assert eventually(lambda: not family & {pid for pid, _ in process_table()})


@needs_proc
def test_workers_do_not_outlive_a_killed_launcher(training):
    family = descendants(training.pid)
    assert len(family) >= 2
    training.kill()
    training.communicate(timeout=60)
    assert eventually(lambda: not family & {pid for pid, _ in process_table()})


@needs_proc
def test_a_worker_killed_in_training_is_named_and_the_others_stopped(training):
    family = descendants(training.pid)
    os.kill(max(family), signal.SIGKILL)  # the youngest process is a worker
    _, errors = training.communicate(timeout=60)
    assert training.returncode == 1
    assert "of 2 died after step" in errors
    assert "killed by SIGKILL. The other workers were stopped." in errors
    assert "Traceback" not in errors
    assert eventually(lambda: not family & {pid for pid, _ in process_table()})


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LabError, match=rf"--port {port}: workers cannot meet there .* leave out --port"):
            check_port(port)
    with pytest.raises(LabError, match="--port 70000: a port is between 1 and 65535"):
        check_port(70000)


def impatient_user() -> None:
    with stoppable():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_is_obeyed_once_and_the_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="SIGTERM") as caught:
        impatient_user()
    assert caught.value.signal_number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
