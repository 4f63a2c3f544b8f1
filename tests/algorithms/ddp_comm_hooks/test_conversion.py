"""Training continues with the twin from a state that torch's hook saved, on the trajectory of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from laconic.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from laconic.algorithms.ddp_comm_hooks.torch_state import read_power_sgd_state
from tests.algorithms.implementations import power
from tests.session.models import batch, mlp
from tests.workers import listen, run_workers

SAVED_AT, STEPS = 6, 16


def _step(model: DDP, optimizer: torch.optim.Optimizer, worker: int, step: int) -> None:
    x, y = batch(worker, step)
    optimizer.zero_grad()
    F.cross_entropy(model(x.double()), y).backward()
    optimizer.step()


def _made(state: Any, hook: Any, saved: dict[str, Any] | None = None) -> tuple[DDP, torch.optim.Optimizer]:
    model = DDP(mlp().double())
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if saved is not None:
        model.module.load_state_dict(saved["model"])
    return model, optimizer


def _flat(model: DDP) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _converted(worker: int, folder: str, settings: dict[str, Any], feedback: Any) -> dict[str, float]:
    """Train with torch, save, continue with torch and with the twin, and compare.

    A new DDP model rebuilds its buckets, so the memory can be converted only at the second backward. To compare the
    same steps, two backward passes without an optimizer step come first.
    """
    theirs = power("torch").PowerSGDState(None, start_powerSGD_iter=2, matrix_approximation_rank=2, **settings)
    model, optimizer = _made(theirs, power("torch").powerSGD_hook)
    for step in range(SAVED_AT):
        _step(model, optimizer, worker, step)
    path = Path(folder, f"worker-{worker}.pt")
    torch.save({"hook": theirs, "epoch": 3}, path)
    ours = PowerSGDState.from_torch(read_power_sgd_state(path), feedback=feedback)
    assert (ours.iter, ours.matrix_approximation_rank) == (SAVED_AT, 2)
    assert ours.compression_stats() == theirs.compression_stats()
    twin, twin_optimizer = _made(ours, powerSGD_hook, {"model": model.module.state_dict()})
    for _ in range(2):
        twin.zero_grad()
        F.cross_entropy(twin(batch(worker, 99)[0].double()), batch(worker, 99)[1]).backward()
    assert ours.error_dict, "the memory was not converted"
    kept = sum(float(t.square().sum()) for t in ours.error_dict.values()) ** 0.5
    had = float(theirs.error_dict[0].norm())
    for step in range(SAVED_AT, STEPS):
        _step(model, optimizer, worker, step)
        _step(twin, twin_optimizer, worker, step)
    return {"difference": float((_flat(model) - _flat(twin)).abs().max()), "kept": kept / had}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"batch_tensors_with_same_shape": True}, {"min_compression_rate": 0.5}], ids=str
)
def test_training_continues_on_torchs_trajectory(settings, tmp_path):
    for result in run_workers(_converted, 2, (str(tmp_path), settings, "mean")):
        assert result["difference"] < 1e-9, f"the weights differ by {result['difference']:.2g}"
        assert result["kept"] == pytest.approx(1, rel=1e-12), "the converted residual is not torch's"


def test_feedback_own_continues_too_and_drops_the_residuals_of_vectors(tmp_path):
    for result in run_workers(_converted, 2, (str(tmp_path), {}, "own")):
        assert 0.1 < result["kept"] < 1
        assert result["difference"] < 1e-9


def _other_model(worker: int, folder: str) -> tuple[list[str], int, int]:
    theirs = power("torch").PowerSGDState(None, start_powerSGD_iter=2)
    model, optimizer = _made(theirs, power("torch").powerSGD_hook)
    for step in range(4):
        _step(model, optimizer, worker, step)
    torch.save(theirs, Path(folder, "state.pt"))
    ours = PowerSGDState.from_torch(read_power_sgd_state(Path(folder, "state.pt")))
    messages = listen()
    other = DDP(mlp(width=48, depth=2).double())
    other.register_comm_hook(ours, powerSGD_hook)
    for step in range(4):
        other.zero_grad()
        F.cross_entropy(other(batch(worker, step, width=48)[0].double()), batch(worker, step)[1]).backward()
    return [text for text in messages if "dropped" in text], ours.iter, len(ours.error_dict)


def test_memory_of_another_model_is_dropped_with_a_warning(tmp_path):
    warned, steps, residuals = run_workers(_other_model, 1, (str(tmp_path),))[0]
    assert len(warned) == 1 and "the same model and bucket_cap_mb" in warned[0]
    assert steps == 8 and residuals > 0
