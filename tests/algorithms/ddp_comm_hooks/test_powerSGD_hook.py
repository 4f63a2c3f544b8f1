"""PowerSGD's hooks: torch's trajectory, training, and settings that must agree between workers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic import DisagreementError
from laconic.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from tests.algorithms.implementations import hooked, power, power_state, sgd, train
from tests.session.models import assert_equal_bits, mlp, weights
from tests.workers import run_workers

SETTINGS: list[dict[str, Any]] = [
    {"matrix_approximation_rank": 1},
    {"matrix_approximation_rank": 2},
    {"matrix_approximation_rank": 4},
    {"matrix_approximation_rank": 2, "warm_start": False},
    {"matrix_approximation_rank": 2, "use_error_feedback": False},
    {"matrix_approximation_rank": 2, "use_error_feedback": False, "warm_start": False, "start_powerSGD_iter": 0},
    {"matrix_approximation_rank": 2, "batch_tensors_with_same_shape": True},
    {"matrix_approximation_rank": 3, "batch_tensors_with_same_shape": True, "warm_start": False},
    {"matrix_approximation_rank": 2, "min_compression_rate": 7.5},
    {"matrix_approximation_rank": 4, "min_compression_rate": 0.5},
    {"matrix_approximation_rank": 2, "random_seed": 7, "start_powerSGD_iter": 5},
]


def _trajectory(worker: int, implementation: str, settings: dict[str, Any]) -> tuple[Tensor, float, Any]:
    """Return the weights after each step, the norm of the residual at the end, and the state."""
    state = power_state(implementation, **settings)
    model = hooked(mlp().double(), state, power(implementation).powerSGD_hook)
    optimizer = sgd(model, momentum=0.5)
    after = []
    for step in range(12):
        train(model, optimizer, worker, [step])
        after.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    residual = sum(float(t.square().sum()) for t in state.error_dict.values()) ** 0.5
    return torch.stack(after), residual, state


def _both(worker: int) -> list[tuple[float, float, float, float, bool]]:
    """Return for each setting the difference of the weights, three residuals, and whether the statistics are equal."""
    results = []
    for settings in SETTINGS:
        theirs, their_residual, their_state = _trajectory(worker, "torch", settings)
        mean, mean_residual, state = _trajectory(worker, "laconic", {**settings, "feedback": "mean"})
        own, own_residual, _ = _trajectory(worker, "laconic", settings)
        difference = max(float((theirs - mean).abs().max()), float((theirs - own).abs().max()))
        counts = state.compression_stats() == their_state.compression_stats() and state.iter == their_state.iter
        results.append((difference, their_residual, mean_residual, own_residual, counts))
    return results


@pytest.mark.slow
def test_weights_follow_torchs_trajectory_and_with_its_feedback_so_does_the_residual():
    """Both rules of feedback give the same mean, except for rounding. The residuals differ."""
    for results in run_workers(_both, 2):
        for settings, (difference, theirs, mean, own, counts) in zip(SETTINGS, results, strict=True):
            assert difference < 1e-9, f"{settings}: the weights differ by {difference:.2g} after 12 steps"
            assert mean == pytest.approx(theirs, rel=1e-9), f"{settings}: the residual differs"
            if settings.get("use_error_feedback", True):
                assert 0 < own < 0.9 * theirs, f"{settings}: our residual is {own}, torch's {theirs}"
            # With a rate below 1, torch compresses a vector as a matrix of one column: n + 1 numbers for n.
            assert counts or settings.get("min_compression_rate", 2) < 1, f"{settings}: the statistics differ"


def _batched(worker: int) -> dict[int, tuple[float, float, Tensor]]:
    results = {}
    for rank in (1, 2, 4):
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model = hooked(mlp(), state, batched_powerSGD_hook, bucket_cap_mb=0.01)
        losses = train(model, sgd(model), worker, [0, 1] * 30)
        assert state.compression_stats()[0] > 2
        results[rank] = (losses[0], losses[-1], weights(model))
    return results


@pytest.mark.slow
def test_the_batched_hook_trains_at_every_rank():
    per_worker = run_workers(_batched, 2)
    for rank in (1, 2, 4):
        assert_equal_bits([result[rank][2] for result in per_worker])
        for result in per_worker:
            first, last, _ = result[rank]
            assert last < 0.5 * first, f"rank {rank}: the loss went from {first:.3f} to {last:.3f}"


def _long(worker: int) -> tuple[Tensor, int]:
    state = PowerSGDState(None, start_powerSGD_iter=10)
    model = hooked(mlp(width=96, depth=6), state, powerSGD_hook, bucket_cap_mb=0.02)
    train(model, sgd(model, lr=0.1), worker, range(500), width=96, size=4)
    return weights(model), len(state.state_dict()["layout"])


@pytest.mark.nightly
def test_defaults_over_several_buckets_for_500_steps():
    results = run_workers(_long, 4, timeout_s=170)
    assert results[0][1] >= 4, f"only {results[0][1]} buckets"
    assert_equal_bits([found for found, _ in results])
    assert results[0][0].isfinite().all()


class Two(nn.Module):
    """Two matrices, whose shapes `swapped` exchanges."""

    def __init__(self, swapped: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        shapes = [(24, 16), (16, 24)]
        self.first, self.second = (
            nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in (shapes[::-1] if swapped else shapes)
        )

    def forward(self) -> Tensor:
        return (self.first.sum() + self.second.sum()).float()


DIFFERENCES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "rank": ({"matrix_approximation_rank": 2}, ["matrix_approximation_rank: 2", "matrix_approximation_rank: 1"]),
    "seed": ({"random_seed": 5}, ["random_seed"]),
    "start": ({"start_powerSGD_iter": 3}, ["start_powerSGD_iter: 3", "start_powerSGD_iter: 2"]),
    "rule": ({"feedback": "mean"}, ["feedback: mean", "feedback: own"]),
    "hook": ({"hook": batched_powerSGD_hook}, ["batched_powerSGD_hook"]),
    "order": ({"swapped": True}, ["[16, 24]", "[24, 16]"]),
    "dtype": ({"dtype": torch.bfloat16}, ["bfloat16", "float32"]),
}


def _differs(worker: int) -> dict[str, str]:
    errors = {}
    for name, (change, _) in DIFFERENCES.items():
        settings = dict(change) if worker == 1 else {}
        hook = settings.pop("hook", powerSGD_hook)
        net = Two(settings.pop("swapped", False), settings.pop("dtype", torch.float32))
        # Without init_sync=False, DDP's constructor compares the shapes.
        model = hooked(net, power_state("laconic", **settings), hook, init_sync=False)
        try:
            model().backward()
            errors[name] = "no error"
        except DisagreementError as error:
            errors[name] = str(error)
    return errors


def test_different_settings_raise_the_same_error_on_every_worker():
    per_worker = run_workers(_differs, 3, timeout_s=30)
    for name, (_, words) in DIFFERENCES.items():
        for errors in per_worker:
            assert errors[name] == per_worker[0][name], f"{name}: the errors of the workers differ"
            assert "worker 1 has" in errors[name] and "worker 0 has" in errors[name], f"{name}: {errors[name]}"
            assert all(word in errors[name] for word in words), f"{name}: {errors[name]}"


def _copied(worker: int) -> None:
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, feedback="mean")
    train(hooked(mlp(), state, powerSGD_hook), None, worker, range(4))
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):  # noqa: S301
        assert other.iter == 4 and other.feedback == "mean"
        assert list(other.error_dict) == list(state.error_dict) and other.error_dict
        for name, residual in state.error_dict.items():
            assert torch.equal(residual, other.error_dict[name])
            assert residual.data_ptr() != other.error_dict[name].data_ptr()
        assert other.rng.randint(10**9) == copy.deepcopy(state).rng.randint(10**9)
    with pytest.raises(ValueError, match=r"saved with matrix_approximation_rank=2 and .* has .*=4"):
        PowerSGDState(None, matrix_approximation_rank=4).load_state_dict(state.state_dict())


def test_states_can_be_copied_and_loading_checks_the_settings():
    run_workers(_copied, 1)


def test_invalid_settings_raise():
    with pytest.raises(ValueError, match="Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start`"):
        PowerSGDState(None, start_powerSGD_iter=1)
    PowerSGDState(None, start_powerSGD_iter=0, use_error_feedback=False, warm_start=False)
