"""PowerSGD's hooks: torch's trajectory where torch's rule is asked for, training, and settings that must agree."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from laconic.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from laconic.checks.agreement import DisagreementError
from tests.algorithms.implementations import power
from tests.session.models import assert_equal_bits, batch, mlp, weights
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
    """Weights after each step, the size of the residual at the end, and the state."""
    model = DDP(mlp().double())
    state = power(implementation).PowerSGDState(None, **{"start_powerSGD_iter": 2, **settings})
    model.register_comm_hook(state, power(implementation).powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    after = []
    for step in range(12):
        x, y = batch(worker, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        optimizer.step()
        after.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    residual = sum(float(t.square().sum()) for t in state.error_dict.values()) ** 0.5
    return torch.stack(after), residual, state


def _both(worker: int) -> list[tuple[float, float, float, float, bool]]:
    """For each setting: how far weights are apart; the residuals of torch, of its rule and of ours; equal counts."""
    results = []
    for settings in SETTINGS:
        theirs, their_residual, their_state = _trajectory(worker, "torch", settings)
        mean, mean_residual, state = _trajectory(worker, "laconic", {**settings, "feedback": "mean"})
        own, own_residual, _ = _trajectory(worker, "laconic", settings)
        apart = max(float((theirs - mean).abs().max()), float((theirs - own).abs().max()))
        counts = state.compression_stats() == their_state.compression_stats() and state.iter == their_state.iter
        results.append((apart, their_residual, mean_residual, own_residual, counts))
    return results


def test_the_trajectory_is_torchs_and_under_its_rule_the_residual_too():
    """The two rules give the same mean as long as nothing is rounded; what differs is what each worker carries."""
    for results in run_workers(_both, 2):
        for settings, (apart, theirs, mean, own, counts) in zip(SETTINGS, results, strict=True):
            assert apart < 1e-9, f"{settings}: {apart:.2g} apart after 12 steps"
            assert mean == pytest.approx(theirs, rel=1e-9), f"{settings}: another residual"
            if settings.get("use_error_feedback", True):
                assert 0 < own < 0.9 * theirs, f"{settings}: our residual is {own}, torch's {theirs}"
            # torch takes a vector for a matrix of one column where compression may lose: n + 1 numbers for n.
            assert counts or settings.get("min_compression_rate", 2) < 1, f"{settings}: other statistics"


def _batched(worker: int) -> dict[int, tuple[float, float, Tensor]]:
    results = {}
    for rank in (1, 2, 4):
        model = DDP(mlp(), bucket_cap_mb=0.01)
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, batched_powerSGD_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        losses = []
        for step in range(60):
            x, y = batch(worker, step % 2)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert state.compression_stats()[0] > 2
        results[rank] = (losses[0], losses[-1], weights(model))
    return results


def test_the_batched_hook_trains_at_every_rank():
    per_worker = run_workers(_batched, 2)
    for rank in (1, 2, 4):
        assert_equal_bits([result[rank][2] for result in per_worker])
        for result in per_worker:
            first, last, _ = result[rank]
            assert last < 0.5 * first, f"rank {rank}: the loss went from {first:.3f} to {last:.3f}"


def _long(worker: int) -> tuple[Tensor, int]:
    model = DDP(mlp(width=96, depth=6), bucket_cap_mb=0.02)
    state = PowerSGDState(None, start_powerSGD_iter=10)
    model.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(500):
        x, y = batch(worker, step, width=96, size=4)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return weights(model), len(state._layout())


@pytest.mark.nightly
def test_defaults_over_several_buckets_for_500_steps():
    results = run_workers(_long, 4, timeout_s=170)
    assert results[0][1] >= 4, f"only {results[0][1]} buckets"
    assert_equal_bits([found for found, _ in results])
    assert results[0][0].isfinite().all()


class Two(nn.Module):
    """Two matrices; `swapped` registers and uses them the other way round."""

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
    said = {}
    for name, (change, _) in DIFFERENCES.items():
        settings = dict(change) if worker == 1 else {}
        hook = settings.pop("hook", powerSGD_hook)
        module = Two(settings.pop("swapped", False), settings.pop("dtype", torch.float32))
        # DDP itself compares shapes when it is made; two workers that agree on the shapes in another order pass.
        model = DDP(module, init_sync=False)
        model.register_comm_hook(PowerSGDState(None, **{"start_powerSGD_iter": 2, **settings}), hook)
        try:
            model().backward()
            said[name] = "nothing"
        except DisagreementError as error:
            said[name] = str(error)
    return said


def test_settings_that_differ_are_named_on_every_worker():
    per_worker = run_workers(_differs, 3, timeout_s=30)
    for name, (_, words) in DIFFERENCES.items():
        for said in per_worker:
            assert said[name] == per_worker[0][name], f"{name}: workers say different things"
            assert "worker 1 has" in said[name] and "worker 0 has" in said[name], f"{name}: {said[name]}"
            assert all(word in said[name] for word in words), f"{name}: {said[name]}"


def _kept(worker: int) -> None:
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, feedback="mean")
    model = DDP(mlp())
    model.register_comm_hook(state, powerSGD_hook)
    for step in range(4):
        model.zero_grad()
        F.cross_entropy(model(batch(worker, step)[0]), batch(worker, step)[1]).backward()
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):  # noqa: S301
        assert other.iter == 4 and other.feedback == "mean"
        assert list(other.error_dict) == list(state.error_dict) and other.error_dict
        for name, residual in state.error_dict.items():
            assert torch.equal(residual, other.error_dict[name])
            assert residual.data_ptr() != other.error_dict[name].data_ptr()
        assert other.rng.randint(10**9) == copy.deepcopy(state).rng.randint(10**9)
    with pytest.raises(ValueError, match=r"saved with matrix_approximation_rank=2 and .* has .*=4"):
        PowerSGDState(None, matrix_approximation_rank=4).load_state_dict(state.state_dict())


def test_states_are_copied_and_settings_that_shape_them_are_checked():
    run_workers(_kept, 1)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start`"):
        PowerSGDState(None, start_powerSGD_iter=1)
    PowerSGDState(None, start_powerSGD_iter=0, use_error_feedback=False, warm_start=False)
