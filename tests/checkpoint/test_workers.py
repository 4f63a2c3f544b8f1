"""Real workers: a checkpoint appears when all have written, on every worker or on none."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic import checkpoint
from laconic.checkpoint import CheckpointError
from tests.checkpoint.trees import same
from tests.workers import run_workers


def state_of(step: int, worker: int) -> dict[str, Any]:
    return {"who": [step, worker], "w": torch.full((10, worker + 1), float(step))}


def save_some(worker: int, folder: str, wait: bool) -> list[str]:
    for step in range(1, 6):
        time.sleep(0.01 * ((worker * 7 + step) % 4))  # each is the last sometimes
        assert checkpoint.save(folder, state_of(step, worker), step=step, keep=2, wait=wait).wait() or wait
    dist.barrier()
    saved = checkpoint.load(folder)
    assert (saved.step, saved.worker, saved.workers) == (5, worker, dist.get_world_size())
    assert same(saved.state, state_of(5, worker))
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("wait", [True, False])
def test_workers_save_together_and_load_their_own(tmp_path, wait):
    assert run_workers(save_some, workers=3, args=(str(tmp_path), wait)) == [["step-00000004", "step-00000005"]] * 3


def save_with_one_that_cannot(worker: int, folder: str, wait: bool, bad: int) -> list[str]:
    checkpoint.save(folder, state_of(1, worker), step=1)
    with pytest.MonkeyPatch.context() as patch:
        if worker == bad:
            patch.setattr(os, "fsync", full)
        error = error_of(folder, state_of(2, worker), wait)
    dist.barrier()
    listed = sorted(os.listdir(folder))
    dist.barrier()
    checkpoint.save(folder, state_of(3, worker), step=3)
    assert checkpoint.load(folder).step == 3
    return [error, *listed]


def full(*args: object) -> None:
    raise OSError(28, "No space left on device")


def error_of(folder: str, state: Any, wait: bool) -> str:
    try:
        saving = checkpoint.save(folder, state, step=2, wait=wait)
    except CheckpointError as error:
        return str(error)
    saving.wait()
    return str(saving.error)


@pytest.mark.parametrize(("wait", "bad"), [(True, 0), (True, 2), (False, 1)])
def test_if_one_worker_cannot_write_none_has_saved(tmp_path, wait, bad):
    results = run_workers(save_with_one_that_cannot, workers=3, args=(str(tmp_path), wait, bad))
    for worker, (error, *listed) in enumerate(results):
        assert listed == ["step-00000001"]
        assert "step 2 was not saved" in error
        others = f"worker {bad} could not write its file" if worker == 0 else "worker 0 cancelled the save"
        reason = "No space left on device" if worker == bad else others
        assert reason in error


def save_with_one_of_another_kind(worker: int, folder: str) -> str:
    try:
        checkpoint.save(folder, object() if worker == 1 else 1, step=1)
    except (TypeError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_a_wrong_state_on_one_worker_fails_on_all(tmp_path):
    first, second = run_workers(save_with_one_of_another_kind, workers=2, args=(str(tmp_path),))
    assert "CheckpointError: step 1 was not saved" in first and "worker 1 could not write its file" in first
    assert "TypeError: state has the type object" in second
    assert os.listdir(tmp_path) == []


def test_a_worker_that_never_writes_is_named(tmp_path):
    """As two workers of one process, the second of which does nothing after the barrier."""
    with pytest.raises(CheckpointError, match=r"workers \[1\] did not write their files within 0.2 s"):
        checkpoint.save(tmp_path, 1, step=1, worker=0, workers=2, barrier=list, timeout_s=0.2)
    assert os.listdir(tmp_path) == []


def test_without_worker_0_the_others_fail(tmp_path):
    with pytest.raises(CheckpointError, match=r"worker 1 does not see a temporary folder .*do not share the folder"):
        checkpoint.save(tmp_path, 1, step=1, worker=1, workers=2, barrier=list, timeout_s=0.2)
    (tmp_path / ".step-00000001.0123abcd.tmp").mkdir()
    with pytest.raises(CheckpointError, match=r"worker 0 did not complete the checkpoint within 0.2 s"):
        checkpoint.save(tmp_path, 1, step=1, worker=1, workers=2, barrier=list, timeout_s=0.2)


def test_a_worker_left_over_from_an_earlier_run_changes_nothing(tmp_path):
    """It would write to a folder of the same name that a new run has made."""
    orphan = checkpoint.Saving(tmp_path, step=1, worker=1, workers=2, keep=3, timeout_s=1)
    (tmp_path / ".step-00000001.0123abcd.tmp").mkdir()
    orphan._find()
    first = checkpoint.save(tmp_path, "new 0", step=1, worker=0, workers=2, barrier=list, wait=False)
    orphan._finish("old 1", {}, problem=None)
    assert "worker 0 cancelled the save" in str(orphan.error)
    assert not first.ended
    checkpoint.save(tmp_path, "new 1", step=1, worker=1, workers=2, barrier=list)
    assert first.wait()
    assert [checkpoint.load(tmp_path, worker=w).state for w in range(2)] == ["new 0", "new 1"]


def test_any_callable_can_be_the_barrier(tmp_path):
    barrier = threading.Barrier(3)
    errors: list[Any] = []

    def work(worker: int) -> None:
        saving = checkpoint.save(tmp_path, worker, step=1, worker=worker, workers=3, barrier=barrier.wait, wait=False)
        errors.append(saving.wait() or saving.error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [True] * 3
    assert [checkpoint.load(tmp_path, worker=w, workers=3).state for w in range(3)] == [0, 1, 2]


def test_a_barrier_that_fails_leaves_nothing(tmp_path):
    def broken() -> None:
        raise RuntimeError("a worker is gone")

    with pytest.raises(RuntimeError, match="a worker is gone"):
        checkpoint.save(tmp_path, 1, step=1, worker=0, workers=2, barrier=broken)
    assert os.listdir(tmp_path) == []
    checkpoint.save(tmp_path, 1, step=1)


def agree(worker: int, folder: str) -> int:
    """Each worker has its own folder, and each lacks another step."""
    mine = Path(folder, str(worker))
    for step in (1, 2, 3, 4):
        checkpoint.save(mine, [step, worker], step=step, worker=0, workers=1, keep=10)
    if worker < 2:
        (mine / f"step-{4 - worker:08d}" / "worker-00000.safetensors").write_text("{}")
    step = checkpoint.newest_common(mine, worker=0, workers=1)
    assert checkpoint.load(mine, step=step, worker=0, workers=1).state == [step, worker]
    for each in (1, 2) if worker == 2 else ():
        (mine / f"step-{each:08d}" / "manifest.json").unlink()
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"of \[1, 2, 3, 4\], is good on every worker."):
        checkpoint.newest_common(mine, worker=0, workers=1)
    return step


def test_workers_with_folders_of_their_own_agree_on_a_step(tmp_path):
    assert run_workers(agree, workers=3, args=(str(tmp_path),)) == [2] * 3


def test_a_common_step_of_one_worker(tmp_path):
    checkpoint.save(tmp_path, 1, step=7)
    assert checkpoint.newest_common(tmp_path) == 7


def train_and_resume(worker: int, folder: str) -> bool:
    """Train 9 steps with data and residuals that differ between workers; again, from what was saved after 4."""
    ends, saving = [], None
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session = laconic.attach(laconic.power_sgd(rank=1), model, optimizer)
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "session": session}
        if saving is not None:
            assert saving.wait()
            dist.barrier()
            for name, state in checkpoint.load(folder).state.items():
                parts[name].load_state_dict(state)
        while session.step < 9:
            data = torch.Generator().manual_seed(100 * session.step + worker)
            optimizer.zero_grad()
            model(torch.randn(8, 16, generator=data)).square().mean().backward()
            optimizer.step()
            if session.step == 4:
                state = {name: part.state_dict() for name, part in parts.items()}
                saving = checkpoint.save(folder, state, step=4, wait=False)
        ends.append([p.detach().clone() for p in model.parameters()])
    return same(*ends)


def test_a_resumed_training_goes_on_bit_for_bit(tmp_path):
    assert run_workers(train_and_resume, workers=2, args=(str(tmp_path),)) == [True, True]
