"""`accelerator.save_state` and `load_state` with each worker's state of a session."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.integrations import worker_files
from tests.integrations.test_accelerate import PLANS, STEPS, WORKERS, make
from tests.integrations.torchrun_env import run_as_torchrun

pytestmark = pytest.mark.frameworks
pytest.importorskip("accelerate")


def _train_and_save(worker: int, plan: str, folder: str, resume: bool) -> tuple[list[float], list[Tensor]]:
    """Train 8 steps and save after the third; or load that, and train the rest."""
    from accelerate import Accelerator

    from laconic.integrations.accelerate import checkpoint

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, scheduler = accelerator.prepare(*make())
    session = laconic.attach(laconic.plan(plan), model, optimizer)
    checkpoint(accelerator, session)
    losses, batches = [], list(loader)
    if resume:
        with torch.no_grad():
            next(model.parameters()).fill_(7.0)  # all of it must come from the checkpoint
        accelerator.load_state(folder)
        assert session.step == 3
    for index, (x, y) in enumerate(batches):
        if index < session.step:
            continue
        loss = nn.functional.mse_loss(model(x + 0.01 * torch.randn_like(x)), y)  # generators are restored, too
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if session.step == 3 and not resume:
            accelerator.save_state(folder)
            assert sorted(p.name for p in Path(folder).glob("laconic*")) == [
                f"laconic_{each}.safetensors" for each in range(WORKERS)
            ]
        if session.step == STEPS:
            break
    session.detach()
    return losses, [p.detach().clone() for p in model.parameters()]


def _save_all(worker: int, folder: str, resume: bool) -> dict[str, Any]:
    torch.manual_seed(worker)
    return {plan: _train_and_save(worker, plan, f"{folder}/{i}", resume) for i, plan in enumerate(PLANS)}


def test_resuming_from_save_state_is_exact(tmp_path):
    whole = run_as_torchrun(_save_all, (str(tmp_path), False))
    resumed = run_as_torchrun(_save_all, (str(tmp_path), True))
    for worker in range(WORKERS):
        for plan in PLANS:
            (losses, weights), (again, others) = whole[worker][plan], resumed[worker][plan]
            assert losses[3:] == again, (plan, worker)
            assert all(map(torch.equal, weights, others)), (plan, worker)
    assert whole[0]["diloco(period=3)"][0] != whole[1]["diloco(period=3)"][0], "workers have data of their own"


def _raised(act: Any, *args: Any) -> str:
    try:
        act(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _load_what_does_not_fit(worker: int, folder: str) -> list[str]:
    from accelerate import Accelerator

    from laconic.integrations.accelerate import checkpoint

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*make()[:2])
    accelerator.save_state(f"{folder}/without")
    session = laconic.attach(laconic.power_sgd(rank=1, min_compression=0), model, optimizer)
    checkpoint(accelerator, session)
    for name in ("saved", "foreign", "mixed"):
        accelerator.save_state(f"{folder}/{name}")
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    if worker == 1:
        (Path(folder) / "foreign" / "laconic_1.safetensors").write_bytes(b"what safetensors does not know")
    else:
        worker_files.save_own(Path(folder) / "mixed", session)  # and worker 1 was killed before it could
    dist.barrier()
    errors = [_raised(accelerator.load_state, f"{folder}/{name}") for name in ("without", "foreign", "mixed")]
    errors.append(_raised(checkpoint, accelerator, session))
    session.detach()
    checkpoint(accelerator, laconic.attach(laconic.ddp(), model, optimizer))  # the name is free again
    return errors


def _load_alone(worker: int, folder: str) -> str:
    from accelerate import Accelerator

    from laconic.integrations.accelerate import checkpoint

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*make()[:2])
    accelerator.load_state(f"{folder}/saved")  # the way out that the error gives
    checkpoint(accelerator, laconic.attach(laconic.power_sgd(rank=1, min_compression=0), model, optimizer))
    return _raised(accelerator.load_state, f"{folder}/saved")


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    first, second = run_as_torchrun(_load_what_does_not_fit, (str(tmp_path),))
    way_out = "with residuals of zero, call accelerator.load_state before checkpoint(accelerator, session)."
    assert re.fullmatch(
        rf"CheckpointError: .*without has no laconic_0.safetensors: it was saved without laconic.*{re.escape(way_out)}",
        first[0],
    )
    assert "another worker could not load its state" in first[1]
    assert "laconic_1.safetensors cannot be read" in second[1] and way_out in second[1]
    assert first[2] == second[2] and "the workers' files are of steps 0 to 1" in first[2]
    assert "name='laconic'): another session writes these files" in first[3]
    (alone,) = run_as_torchrun(_load_alone, (str(tmp_path),), workers=1)
    assert "was saved by 2 workers, and there are 1" in alone and "Start 2 workers" in alone and way_out in alone


def _save_slowly(worker: int, folder: str) -> int:
    from accelerate import Accelerator

    from laconic.integrations.accelerate import checkpoint

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*make()[:2])
    session = laconic.attach(laconic.ddp(), model, optimizer, timeout_s=2.0)
    checkpoint(accelerator, session)
    for step in range(3):
        accelerator.backward(model(torch.ones(1, 8)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            accelerator.save_state(folder)
            time.sleep(4.0 * (worker == 0))  # a large model takes as long
    return session.step


def test_the_others_wait_while_the_first_worker_writes_the_model(tmp_path):
    assert run_as_torchrun(_save_slowly, (str(tmp_path),)) == [3, 3]
