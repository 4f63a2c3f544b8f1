"""Defects D1 to D9 and D23 of torch's PowerSGD: numbers and state. See `docs/twin.md`."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.algorithms.implementations import (
    ReverseOrder,
    averaged,
    averages,
    defect,
    drawn,
    hooked,
    mean_of,
    module,
    power,
    power_state,
    relative_error,
    sgd,
    train,
)
from tests.session.models import assert_equal_bits, mlp, weights
from tests.workers import run_workers


def _residual_norms(worker: int, implementation: str, steps: int) -> list[float]:
    """Average constant gradients that differ between workers. Return the residual at half the steps and at the end."""
    state = power_state(implementation)
    gradients = [drawn(f"weight {worker}", 24, 24), drawn(f"bias {worker}", 24)]
    norms = [
        float(sum(t.double().square().sum() for t in state.error_dict.values()) ** 0.5)
        for _ in averages(state, power(implementation).powerSGD_hook, [gradients] * steps)
    ]
    return [norms[steps // 2 - 1], norms[-1]]


@defect(torch_shows="the residual grew from")
def test_d01_the_residual_stays_bounded(implementation):
    for half, whole in run_workers(_residual_norms, 2, (implementation, 400)):
        assert whole < 1.2 * half, f"the residual grew from {half:.1f} to {whole:.1f} in the second half"


def _distance_in_bf16(worker: int, implementation: str) -> float:
    """The workers' targets are far apart; their mean is the optimum. Gradients are bf16, weights fp32."""
    state = power_state(implementation)
    far = 30 * drawn("far", 24, 24) * (1 if worker else -1)
    optimum = drawn("optimum", 24, 24)
    linear = nn.Linear(24, 24, bias=False, dtype=torch.bfloat16)
    model = hooked(linear, state, power(implementation).powerSGD_hook)
    whole = torch.zeros(24, 24)
    for _ in range(600):
        with torch.no_grad():
            linear.weight.copy_(whole)
        model.zero_grad()
        gradient = (whole - optimum + far).to(torch.bfloat16)
        (model(torch.eye(24, dtype=torch.bfloat16)) * gradient.T).sum().backward()
        assert linear.weight.grad is not None
        whole -= 0.05 * linear.weight.grad.float()
    return relative_error(whole, optimum)


@pytest.mark.slow
@defect(torch_shows="bf16 training ended")
def test_d02_bf16_training_reaches_the_optimum(implementation):
    distances = run_workers(_distance_in_bf16, 2, (implementation,))
    assert max(distances) < 0.05, f"bf16 training ended {max(distances):.4f} of the way from the optimum"


def _batched_loss(worker: int, implementation: str) -> tuple[float, float, Tensor]:
    state = power_state(implementation, matrix_approximation_rank=2)
    model = hooked(mlp(), state, power(implementation).batched_powerSGD_hook)
    losses = train(model, sgd(model), worker, [0] * 40)
    return losses[0], losses[-1], weights(model)


@defect(torch_shows="(?s)_orthogonalize.*AssertionError|died with exit code")
def test_d03_the_batched_hook_trains(implementation):
    results = run_workers(_batched_loss, 2, (implementation,), timeout_s=20)
    assert_equal_bits([result[2] for result in results])
    assert all(last < 0.7 * first for first, last, _ in results)


def _rank_deficient_gradients(worker: int, implementation: str) -> dict[str, float]:
    """Return the error of the mean for gradients of a lower rank than the factors; inf for NaN."""
    row = torch.zeros(24, 24)
    row[worker] = drawn(f"row {worker}", 24)
    cases = {
        "zero": (1, 0.0, torch.zeros(24, 24)),
        "one row": (1, 0.0, drawn("left", 24, 1) @ drawn("right", 1, 24)),
        "two rows at rank 4": (4, 0.0, row),
        "one row at rank 2": (2, 0.0, drawn("left", 24, 1) @ torch.eye(24)[:1]),
        "tiny with an epsilon": (1, 1e-8, 1e-9 * drawn("left", 24, 1) @ drawn("right", 1, 24)),
    }
    errors = {}
    for name, (rank, epsilon, gradient) in cases.items():
        state = power_state(implementation, matrix_approximation_rank=rank, orthogonalization_epsilon=epsilon)
        after = averaged(state, power(implementation).powerSGD_hook, [[gradient]] * 4)[0]
        right = mean_of(gradient)
        error = float((after - right).norm() / (right.norm() if right.any() else 1.0))
        errors[name] = error if after.isfinite().all() else float("inf")
    return errors


@defect(torch_shows=r"the relative error of the mean is \{'zero': inf")
def test_d05_rank_deficient_gradients_are_averaged_exactly(implementation):
    for errors in run_workers(_rank_deficient_gradients, 2, (implementation,)):
        off = {name: error for name, error in errors.items() if error > 1e-5}
        assert not off, f"the relative error of the mean is {off}"


def _overflow(worker: int, implementation: str) -> tuple[bool, bool]:
    """Worker 1 overflows once. Return whether the state is unchanged, and whether the next gradients are finite."""
    state = power_state(implementation)
    good = [drawn(f"good {worker}", 24, 24), drawn(f"good bias {worker}", 24)]
    bad = [good[0] * (float("inf") if worker == 1 else 1.0), good[1]]
    kept: list[list[Tensor]] = []
    found: list[Tensor] = []
    for found in averages(state, power(implementation).powerSGD_hook, [*[good] * 5, bad, good]):  # noqa: B007
        memory = (state.error_dict, state.p_memory_dict, state.q_memory_dict)
        kept.append([t.clone() for memory_dict in memory for t in memory_dict.values()])
    unchanged = all(map(torch.equal, kept[4], kept[5]))
    return unchanged, all(bool(t.isfinite().all()) for t in found)


@defect(torch_shows="the step after an overflow is not finite")
def test_d06_an_overflow_does_not_change_the_state(implementation):
    for unchanged, finite in run_workers(_overflow, 2, (implementation,)):
        assert finite, "the step after an overflow is not finite"
        assert unchanged, "an overflow changed the state"


def _resumed(worker: int, implementation: str) -> float:
    """Train 16 steps, and 8 + 8 with the state pickled in between. Return the largest difference of the weights."""

    def run(net: nn.Module, saved: Any, state: Any, steps: range) -> tuple[nn.Module, Any]:
        model = hooked(net, state, power(implementation).powerSGD_hook)
        optimizer = sgd(model, momentum=0.9)
        if saved is not None:
            optimizer.load_state_dict(saved)
        train(model, optimizer, worker, steps)
        return net, optimizer.state_dict()

    whole, _ = run(ReverseOrder(), None, power_state(implementation), range(16))
    state = power_state(implementation)
    half, saved = run(ReverseOrder(), None, state, range(8))
    rest = ReverseOrder()
    rest.load_state_dict(half.state_dict())
    loaded = pickle.loads(pickle.dumps(state))  # noqa: S301 - pickled in this line
    resumed, _ = run(rest, saved, loaded, range(8, 16))
    return float((weights(whole) - weights(resumed)).abs().max())


@defect(torch_shows="the resumed run is off by|died with exit code|raised:")
def test_d07_a_resumed_run_is_bit_exact(implementation):
    for difference in run_workers(_resumed, 2, (implementation,)):
        assert difference == 0, f"the resumed run is off by {difference:.2g}"


def _in_bf16(worker: int, implementation: str) -> dict[int, float]:
    """Return, by rank, the relative error of a gradient of that rank with a decaying spectrum."""
    errors = {}
    for rank, decay in ((16, 0.6), (32, 0.8)):
        spectrum = torch.tensor([decay**i for i in range(rank)])
        gradient = ((drawn("tall", 256, rank) * spectrum) @ drawn("wide", rank, 256)).to(torch.bfloat16)
        state = power_state(implementation, matrix_approximation_rank=rank, use_error_feedback=False)
        found = averaged(state, power(implementation).powerSGD_hook, [[gradient]] * 4)[0]
        errors[rank] = relative_error(found, gradient)
    return errors


@defect(torch_shows="the relative error of a bf16 gradient is")
def test_d08_bf16_gradients_keep_their_precision(implementation):
    for errors in run_workers(_in_bf16, 2, (implementation,)):
        assert max(errors.values()) < 0.003, f"the relative error of a bf16 gradient is {errors}"


def _unusual_parameter(worker: int, implementation: str, kind: str) -> list[float]:
    """Return the errors of gradients that have rank 1 if they are reshaped to the right matrix."""
    wide = drawn("out", 24, 1) @ drawn(f"in {worker}", 1, 72)
    unusual = {
        "0-d": torch.tensor(float(worker)),
        "empty": torch.zeros(0, 5),
        "transposed": torch.empty(72, 24).t().copy_(wide),
        "channels_last": wide.view(24, 8, 3, 3).to(memory_format=torch.channels_last),
    }[kind]
    plain = drawn("left", 24, 1) @ drawn("right", 1, 24)
    settings = {"use_error_feedback": False}
    found = averaged(
        power_state(implementation, **settings), power(implementation).powerSGD_hook, [[unusual, plain]] * 5
    )
    return [
        relative_error(*pair) for pair in zip(found, [mean_of(unusual), mean_of(plain)], strict=True) if pair[0].numel()
    ]


@pytest.mark.parametrize("kind", ["0-d", "empty", "transposed"])
@defect(torch_shows="raised:|died with exit code|off by")
def test_d09_unusual_parameters(implementation, kind):
    for errors in run_workers(_unusual_parameter, 2, (implementation, kind), timeout_s=20):
        assert max(errors) < 1e-5, f"{kind} is off by {max(errors):.2g}"


def test_d09_channels_last_is_reshaped_as_in_torch():
    for errors in run_workers(_unusual_parameter, 2, ("laconic", "channels_last")):
        assert max(errors) < 1e-5


def _fp16(worker: int, implementation: str, size: float) -> float:
    gradient = drawn("left", 24, 1) @ drawn("right", 1, 24)
    gradient = (size * gradient / gradient.abs().max()).to(torch.float16)
    state = power_state(implementation)
    after = averaged(state, power(implementation).powerSGD_hook, [[gradient]] * 4)[0]
    return relative_error(after, gradient) if after.isfinite().all() else float("inf")


@defect(torch_shows="the relative error of an fp16 gradient .* is inf")
def test_d23_large_fp16_gradients(implementation):
    error = max(run_workers(_fp16, 4, (implementation, 3e4)))
    assert error < 0.02, f"the relative error of an fp16 gradient of 3e4 is {error:.2g}"


def _tiny_through_half(worker: int, implementation: str, half: str) -> tuple[float, float]:
    """Return the relative errors of a gradient of 1e-9, after a few steps, and of one of 1 after it."""
    tiny = 1e-9 * drawn("left", 24, 1) @ drawn("right", 1, 24)
    wrapper = getattr(module(implementation, "ddp_comm_hooks.default_hooks"), f"{half}_compress_wrapper")
    hook = wrapper(power(implementation).powerSGD_hook)
    means = [means[0] for means in averages(power_state(implementation), hook, [*[[tiny]] * 5, [1e9 * tiny]])]
    return relative_error(means[4], tiny), relative_error(means[5], 1e9 * tiny)


@defect(torch_shows="after a gradient of 1e-9 the relative error is nan")
def test_d23_tiny_gradients_through_fp16(implementation):
    for _, later in run_workers(_tiny_through_half, 2, (implementation, "fp16")):
        assert later < 0.01, f"after a gradient of 1e-9 the relative error is {later}"


def test_d23_tiny_gradients_through_bf16():
    for tiny, later in run_workers(_tiny_through_half, 2, ("laconic", "bf16")):
        assert max(tiny, later) < 0.01
