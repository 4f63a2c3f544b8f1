"""What a session opens, it closes; Ctrl-C ends a wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.comm.groups import Levels
from tests.session.models import batch, mlp
from tests.workers import run_workers


def _opened() -> tuple[int, int]:
    """Count the descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _cycles(worker: int, cycles: int, text: str, wrapped: bool) -> tuple[tuple[int, int], tuple[int, int], int]:
    model = DDP(mlp()) if wrapped else mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch(worker, 0)
    F.cross_entropy(model(x), y).backward()  # autograd starts its threads
    before, names = _opened(), set()
    for _ in range(cycles):
        with laconic.attach(laconic.plan(text), model, optimizer) as session:
            assert session.group is not None
            names.add(session.group.group_name)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    return before, _opened(), len(names)


@pytest.mark.parametrize(
    ("text", "cycles", "wrapped"),
    [
        ("ddp()", 8, True),
        ("hierarchical_sgd({1: 2, 2: 4})", 3, False),
        pytest.param("ddp()", 40, False, marks=pytest.mark.slow),
        pytest.param("ddp()", 200, False, marks=pytest.mark.nightly),
    ],
)
def test_cycles_of_attach_and_detach_leave_nothing_open(text, cycles, wrapped):
    for before, after, names in run_workers(_cycles, 4 if "4" in text else 2, (cycles, text, wrapped), timeout_s=120):
        assert after == before
        assert names == cycles, "the store still has the addresses of a group of the same name"


def _levels(worker: int) -> tuple[tuple[int, int], tuple[int, int]]:
    before = _opened()
    levels = Levels([2, None], dist.group.WORLD, laconic.Ledger())
    levels.prepare([2, None])
    dist.barrier()
    levels.close()
    levels.close()
    dist.barrier()
    return before, _opened()


def test_levels_close_what_they_opened():
    for before, after in run_workers(_levels, 4):
        assert after == before


def _after_the_world(worker: int) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = laconic.attach(laconic.ddp(), model, optimizer)
    dist.barrier()
    dist.destroy_process_group()
    session.detach()


def test_a_session_may_be_detached_after_its_group_was_destroyed(tmp_path):
    run_workers(_after_the_world_alone, 2, (str(tmp_path / "store"),), group=False)


def _after_the_world_alone(worker: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=worker, world_size=2)
    _after_the_world(worker)


def _interrupted(worker: int, store: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=worker, world_size=2)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = laconic.attach(laconic.ddp(), model, optimizer)
    if worker == 1:
        time.sleep(600)  # never arrives
    x, y = batch(worker, 0)
    F.cross_entropy(model(x), y).backward()
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        optimizer.step()
    except KeyboardInterrupt:
        with pytest.raises(RuntimeError, match="a signal has interrupted this worker's wait for the others"):
            session.gather([1])
        print("interrupted", flush=True)  # noqa: T201 - for the test
        raise


@pytest.mark.slow
def test_ctrl_c_ends_a_wait_and_the_process(tmp_path):
    code = "import sys; from tests.session.test_life_cycle import _interrupted as f; f(int(sys.argv[1]), sys.argv[2])"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(worker), str(tmp_path / "store")],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for worker in range(2)
    ]
    waiting, late = started
    try:
        said, _ = waiting.communicate(timeout=120)
        assert late.poll() is None, "it has not arrived"
        assert "interrupted" in said and waiting.returncode != 0
    finally:
        for process in started:
            process.kill()
            process.communicate()
