"""Rows D1 to D12, D23 and D24: PowerSGD. Each passes over the twin and fails over torch; see `docs/twin.md`."""

from __future__ import annotations

import pickle
import time
import zlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.algorithms.implementations import (
    Collectives,
    averaged,
    averages,
    defect,
    mean_of,
    module,
    power,
    relative_error,
)
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import run_workers


def _state(implementation: str, **settings: Any) -> Any:
    return power(implementation).PowerSGDState(None, **{"start_powerSGD_iter": 2, **settings})


def _drawn(seed: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers that `seed` alone decides, on any worker."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return torch.randn(shape, generator=generator).to(dtype)


def _residual_norms(worker: int, implementation: str, steps: int) -> list[float]:
    """Gradients that differ between workers and never change; the residual after half of the steps, and after all."""
    state = _state(implementation)
    gradients = [_drawn(f"weight {worker}", 24, 24), _drawn(f"bias {worker}", 24)]
    norms = [
        float(sum(t.double().square().sum() for t in state.error_dict.values()) ** 0.5)
        for _ in averages(state, power(implementation).powerSGD_hook, [gradients] * steps)
    ]
    return [norms[steps // 2 - 1], norms[-1]]


@defect(torch_shows="the residual grew from")
def test_d01_the_residual_stays_bounded(implementation):
    for half, whole in run_workers(_residual_norms, 2, (implementation, 400)):
        assert whole < 1.2 * half, f"the residual grew from {half:.1f} to {whole:.1f} in as many steps again"


def _distance_in_bf16(worker: int, implementation: str) -> float:
    """Workers pull towards targets far apart; their mean is the optimum. Gradients are bf16, weights fp32."""
    state = _state(implementation)
    far = 30 * _drawn("far", 24, 24) * (1 if worker else -1)
    optimum = _drawn("optimum", 24, 24)
    model = DDP(nn.Linear(24, 24, bias=False, dtype=torch.bfloat16))
    model.register_comm_hook(state, power(implementation).powerSGD_hook)
    whole = torch.zeros(24, 24)
    for _ in range(600):
        with torch.no_grad():
            model.module.weight.copy_(whole)
        model.zero_grad()
        gradient = (whole - optimum + far).to(torch.bfloat16)
        (model(torch.eye(24, dtype=torch.bfloat16)) * gradient.T).sum().backward()
        whole -= 0.05 * model.module.weight.grad.float()
    return relative_error(whole, optimum)


@defect(torch_shows="bf16 training ended")
def test_d02_bf16_training_reaches_the_optimum(implementation):
    distances = run_workers(_distance_in_bf16, 2, (implementation,))
    assert max(distances) < 0.05, f"bf16 training ended {max(distances):.4f} of the way from the optimum"


def _batched_loss(worker: int, implementation: str) -> tuple[float, float, Tensor]:
    model = DDP(mlp())
    model.register_comm_hook(
        _state(implementation, matrix_approximation_rank=2), power(implementation).batched_powerSGD_hook
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for _ in range(40):
        x, y = batch(worker, 0)
        loss = F.cross_entropy(model(x), y)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses[0], losses[-1], weights(model)


@defect(torch_shows="(?s)_orthogonalize.*AssertionError|died with exit code")
def test_d03_the_batched_hook_trains(implementation):
    results = run_workers(_batched_loss, 2, (implementation,), timeout_s=20)
    assert_equal_bits([result[2] for result in results])
    assert all(last < 0.7 * first for first, last, _ in results)


def _several_buckets(worker: int, implementation: str) -> Tensor:
    model = DDP(mlp(width=64, depth=6), bucket_cap_mb=0.02)
    model.register_comm_hook(_state(implementation), power(implementation).powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        x, y = batch(worker, step, width=64)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return weights(model)


@defect(torch_shows="died with exit code|did not end within|raised:|worker 1 differs")
def test_d04_several_buckets_on_gloo(implementation):
    assert_equal_bits(run_workers(_several_buckets, 4, (implementation,), timeout_s=30))


def _poor_gradients(worker: int, implementation: str) -> dict[str, float]:
    """Errors, against the mean, for gradients that span less than the rank; inf where NaN came out."""
    row = torch.zeros(24, 24)
    row[worker] = _drawn(f"row {worker}", 24)
    cases = {
        "zero": (1, 0.0, torch.zeros(24, 24)),
        "one row": (1, 0.0, _drawn("left", 24, 1) @ _drawn("right", 1, 24)),
        "two rows at rank 4": (4, 0.0, row),
        "one row at rank 2": (2, 0.0, _drawn("left", 24, 1) @ torch.eye(24)[:1]),
        "tiny with an epsilon": (1, 1e-8, 1e-9 * _drawn("left", 24, 1) @ _drawn("right", 1, 24)),
    }
    errors = {}
    for name, (rank, epsilon, gradient) in cases.items():
        state = _state(implementation, matrix_approximation_rank=rank, orthogonalization_epsilon=epsilon)
        after = averaged(state, power(implementation).powerSGD_hook, [[gradient]] * 4)[0]
        right = mean_of(gradient)
        error = float((after - right).norm() / (right.norm() if right.any() else 1.0))
        errors[name] = error if after.isfinite().all() else float("inf")
    return errors


@defect(torch_shows=r"the mean is off by a factor of \{'zero': inf")
def test_d05_poor_gradients_arrive_exactly(implementation):
    for errors in run_workers(_poor_gradients, 2, (implementation,)):
        off = {name: error for name, error in errors.items() if error > 1e-5}
        assert not off, f"the mean is off by a factor of {off}"


def _overflow(worker: int, implementation: str) -> tuple[bool, bool]:
    """Worker 1 overflows once. Returns whether the state stayed as it was, and the next gradients finite."""
    state = _state(implementation)
    good = [_drawn(f"good {worker}", 24, 24), _drawn(f"good bias {worker}", 24)]
    bad = [good[0] * (float("inf") if worker == 1 else 1.0), good[1]]
    kept: list[list[Tensor]] = []
    found: list[Tensor] = []
    for found in averages(state, power(implementation).powerSGD_hook, [*[good] * 5, bad, good]):  # noqa: B007
        memory = (state.error_dict, state.p_memory_dict, state.q_memory_dict)
        kept.append([t.clone() for memory_dict in memory for t in memory_dict.values()])
    untouched = all(map(torch.equal, kept[4], kept[5]))
    return untouched, all(bool(t.isfinite().all()) for t in found)


@defect(torch_shows="the step after an overflow is not finite")
def test_d06_an_overflow_leaves_the_state_as_it_was(implementation):
    for untouched, finite in run_workers(_overflow, 2, (implementation,)):
        assert finite, "the step after an overflow is not finite"
        assert untouched, "an overflow changed the state"


class Backwards(nn.Module):
    """Layers used in another order than they are registered in, so that DDP lays its buckets out anew."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.middle, self.first = nn.Linear(40, 4), nn.Linear(48, 40), nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return result


def _resumed(worker: int, implementation: str) -> tuple[float, bool]:
    """Train 16 steps, and 8 + 8 with state and all pickled in between; how far apart they end."""

    def train(module: nn.Module, momentum: Any, state: Any, steps: range) -> tuple[nn.Module, Any]:
        model = DDP(module)
        model.register_comm_hook(state, power(implementation).powerSGD_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        if momentum is not None:
            optimizer.load_state_dict(momentum)
        for step in steps:
            x, y = batch(worker, step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return module, optimizer.state_dict()

    whole, _ = train(Backwards(), None, _state(implementation), range(16))
    state = _state(implementation)
    half, momentum = train(Backwards(), None, state, range(8))
    rest = Backwards()
    rest.load_state_dict(half.state_dict())
    loaded = pickle.loads(pickle.dumps(state))  # noqa: S301 - made on the line itself
    resumed, _ = train(rest, momentum, loaded, range(8, 16))
    apart = weights(whole) - weights(resumed)
    return float(apart.abs().max()), torch.equal(weights(whole), weights(resumed))


@defect(torch_shows="the resumed run is off by|died with exit code|raised:")
def test_d07_a_resumed_run_is_bit_exact(implementation):
    for apart, equal in run_workers(_resumed, 2, (implementation,)):
        assert equal, f"the resumed run is off by {apart:.2g}"


def _in_bf16(worker: int, implementation: str) -> dict[int, float]:
    """By rank, what is lost of a gradient of that rank, with a spectrum that falls: bf16's rounding and no more."""
    lost = {}
    for rank, fall in ((16, 0.6), (32, 0.8)):
        spectrum = torch.tensor([fall**place for place in range(rank)])
        gradient = ((_drawn("tall", 256, rank) * spectrum) @ _drawn("wide", rank, 256)).to(torch.bfloat16)
        state = _state(implementation, matrix_approximation_rank=rank, use_error_feedback=False)
        found = averaged(state, power(implementation).powerSGD_hook, [[gradient]] * 4)[0]
        lost[rank] = relative_error(found, gradient)
    return lost


@defect(torch_shows="of a bf16 gradient is lost")
def test_d08_bf16_gradients_keep_their_precision(implementation):
    for by_rank in run_workers(_in_bf16, 2, (implementation,)):
        for rank, lost in by_rank.items():
            assert lost < 0.003, f"at rank {rank}, {100 * lost:.2g} % of a bf16 gradient is lost"


def _odd_parameter(worker: int, implementation: str, kind: str) -> list[float]:
    """Each gradient is of rank 1 if it is taken for the right matrix, so that it should arrive whole."""
    wide = _drawn("out", 24, 1) @ _drawn(f"in {worker}", 1, 72)
    odd = {
        "0-d": torch.tensor(float(worker)),
        "empty": torch.zeros(0, 5),
        "transposed": torch.empty(72, 24).t().copy_(wide),
        "channels_last": wide.view(24, 8, 3, 3).to(memory_format=torch.channels_last),
    }[kind]
    plain = _drawn("left", 24, 1) @ _drawn("right", 1, 24)
    settings = {"use_error_feedback": False}
    found = averaged(_state(implementation, **settings), power(implementation).powerSGD_hook, [[odd, plain]] * 5)
    return [
        relative_error(*pair) for pair in zip(found, [mean_of(odd), mean_of(plain)], strict=True) if pair[0].numel()
    ]


@pytest.mark.parametrize("kind", ["0-d", "empty", "transposed"])
@defect(torch_shows="raised:|died with exit code|off by")
def test_d09_odd_parameters(implementation, kind):
    for errors in run_workers(_odd_parameter, 2, (implementation, kind), timeout_s=20):
        assert max(errors) < 1e-5, f"{kind} is off by {max(errors):.2g}"


def test_d09_channels_last_as_in_torch_is_the_right_matrix():
    for errors in run_workers(_odd_parameter, 2, ("laconic", "channels_last")):
        assert max(errors) < 1e-5


def _other_seed(worker: int, implementation: str) -> str:
    try:
        averaged(
            _state(implementation, random_seed=worker),
            power(implementation).powerSGD_hook,
            [[_drawn(f"gradient {worker}", 24, 24)]] * 3,
        )
    except RuntimeError as error:
        return str(error)
    return ""


@defect(torch_shows="nobody noticed")
def test_d10_seeds_that_differ_are_named(implementation):
    for said in run_workers(_other_seed, 2, (implementation,)):
        assert "random_seed" in said and "worker 1" in said, f"nobody noticed: {said!r}"


def _traffic(worker: int, implementation: str) -> tuple[list[int], int]:
    """Number of elements of each all-reduce, and calls of `cuda.synchronize`, in one step of matrices only."""
    state = _state(implementation)
    model = DDP(nn.Linear(24, 24, bias=False))
    model.register_comm_hook(state, power(implementation).powerSGD_hook)
    for _ in range(3):
        model(torch.ones(2, 24)).sum().backward()
    loss = model(torch.ones(2, 24)).sum()
    seen = Collectives.watch()
    calls: list[Any] = []
    torch.cuda.is_available = lambda: True
    torch.cuda.synchronize = calls.append  # type: ignore[assignment]
    loss.backward()
    return seen.numels, len(calls)


@defect(torch_shows="empty all-reduces, 1 waits for the device")
def test_d10_nothing_empty_is_sent_and_the_device_is_not_waited_for(implementation):
    for numels, waits in run_workers(_traffic, 2, (implementation,)):
        empty = numels.count(0)
        assert not empty and not waits, f"{empty} empty all-reduces, {waits} waits for the device in one bucket"
        assert numels == [24, 24]


def _counted(worker: int, implementation: str) -> tuple[int, int, tuple[float, int, int]]:
    state = _state(implementation)
    seen = Collectives.watch()
    averaged(state, power(implementation).powerSGD_hook, [[_drawn("weight", 24, 24), torch.ones(24)]] * 5)
    return state.ledger.payload_bytes, sum(seen.sizes_bytes), state.compression_stats()


@defect(torch_shows="has no attribute 'ledger'")
def test_d11_bytes_are_counted(implementation):
    for ledger, sent, stats in run_workers(_counted, 2, (implementation,)):
        assert ledger == sent > 0
        assert stats == (600 / 72, 3 * 600, 3 * 72)


def _weight_sync(worker: int, implementation: str) -> float:
    """All-reduces for each step of a model in one bucket."""
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if implementation == "laconic":
        laconic.attach(laconic.power_sgd(rank=2, rounds="alternating"), model, optimizer)
    else:
        model.register_comm_hook(_state(implementation), power(implementation).powerSGD_hook)
    seen = Collectives.watch()
    for step in range(4):
        if step == 2:
            seen.numels.clear()
        optimizer.zero_grad()
        F.cross_entropy(model(batch(worker, step)[0]), batch(worker, step)[1]).backward()
        optimizer.step()
    return len(seen.numels) / 2


@defect(torch_shows="3.0 all-reduces a step")
def test_d12_one_round_a_step(implementation):
    for rounds in run_workers(_weight_sync, 2, (implementation,)):
        assert rounds == 1, f"{rounds} all-reduces a step"


def _fp16(worker: int, implementation: str, size: float) -> float:
    gradient = _drawn("left", 24, 1) @ _drawn("right", 1, 24)
    gradient = (size * gradient / gradient.abs().max()).to(torch.float16)
    state = _state(implementation)
    after = averaged(state, power(implementation).powerSGD_hook, [[gradient]] * 4)[0]
    return relative_error(after, gradient) if after.isfinite().all() else float("inf")


@defect(torch_shows="an fp16 gradient of .* arrives off by inf")
def test_d23_large_fp16_gradients(implementation):
    error = max(run_workers(_fp16, 4, (implementation, 3e4)))
    assert error < 0.02, f"an fp16 gradient of 3e4 arrives off by {error:.2g}"


def _tiny_through_half(worker: int, implementation: str, half: str) -> tuple[float, float]:
    """A gradient of 1e-9 for a few steps, then one of 1, through a wrapper; how far each arrives off."""
    tiny = 1e-9 * _drawn("left", 24, 1) @ _drawn("right", 1, 24)
    wrapper = getattr(module(implementation, "ddp_comm_hooks.default_hooks"), f"{half}_compress_wrapper")
    hook = wrapper(power(implementation).powerSGD_hook)
    means = [means[0] for means in averages(_state(implementation), hook, [*[[tiny]] * 5, [1e9 * tiny]])]
    return relative_error(means[4], tiny), relative_error(means[5], 1e9 * tiny)


@defect(torch_shows="the step after a gradient of 1e-9 arrives off by nan")
def test_d23_tiny_gradients_through_fp16(implementation):
    for _, later in run_workers(_tiny_through_half, 2, (implementation, "fp16")):
        assert later < 0.01, f"the step after a gradient of 1e-9 arrives off by {later}"


def test_d23_tiny_gradients_through_bf16_arrive():
    for tiny, later in run_workers(_tiny_through_half, 2, ("laconic", "bf16")):
        assert max(tiny, later) < 0.01


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        result: Tensor = self.head((self.left if left else self.right)(x))
        return result


def _late(hook: Any) -> Any:
    """Return to DDP late: what the hook starts by then comes before what DDP starts, and after it on other workers."""

    def late(state, bucket):
        future = hook(state, bucket)
        time.sleep(0.02)
        return future

    return late


def _unused(worker: int, implementation: str) -> Tensor:
    model = DDP(Unused(), find_unused_parameters=True)
    hook = power(implementation).powerSGD_hook
    model.register_comm_hook(_state(implementation), _late(hook) if worker == 1 else hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(30):
        x, y = batch(worker, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x, (step + worker) % 2 == 0), y).backward()
        optimizer.step()
    return weights(model)


@defect(torch_shows="died with exit code|did not end within|raised:|worker 1 differs")
def test_d24_unused_parameters_do_not_race_with_the_hook(implementation):
    results = run_workers(_unused, 4, (implementation,), timeout_s=30)
    assert_equal_bits(results)
    assert results[0].isfinite().all()
