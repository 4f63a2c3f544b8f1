"""Defects D4, D10 to D12 and D24 of torch's PowerSGD: collectives and checks. See `docs/twin.md`."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.algorithms.implementations import (
    Collectives,
    averaged,
    defect,
    drawn,
    hooked,
    power,
    power_state,
    sgd,
    train,
)
from tests.session.models import assert_equal_bits, mlp, weights
from tests.workers import run_workers


def _several_buckets(worker: int, implementation: str) -> Tensor:
    net, state = mlp(width=64, depth=6), power_state(implementation)
    model = hooked(net, state, power(implementation).powerSGD_hook, bucket_cap_mb=0.02)
    train(model, sgd(model), worker, range(40), width=64)
    return weights(model)


@defect(torch_shows="died with exit code|did not end within|raised:|worker 1 differs")
def test_d04_several_buckets_on_gloo(implementation):
    assert_equal_bits(run_workers(_several_buckets, 4, (implementation,), timeout_s=30))


def _other_seed(worker: int, implementation: str) -> str:
    try:
        averaged(
            power_state(implementation, random_seed=worker),
            power(implementation).powerSGD_hook,
            [[drawn(f"gradient {worker}", 24, 24)]] * 3,
        )
    except RuntimeError as error:
        return str(error)
    return ""


@defect(torch_shows="no error, or another one: ''")
def test_d10_different_seeds_raise(implementation):
    for message in run_workers(_other_seed, 2, (implementation,)):
        assert "random_seed" in message and "worker 1" in message, f"no error, or another one: {message!r}"


def _traffic(worker: int, implementation: str) -> tuple[list[int], int]:
    """Return the elements of each all-reduce, and the calls of `cuda.synchronize`, in one step of matrices only."""
    state = power_state(implementation)
    model = hooked(nn.Linear(24, 24, bias=False), state, power(implementation).powerSGD_hook)
    for _ in range(3):
        model(torch.ones(2, 24)).sum().backward()
    loss = model(torch.ones(2, 24)).sum()
    seen = Collectives.watch()
    calls: list[Any] = []
    torch.cuda.is_available = lambda: True
    torch.cuda.synchronize = calls.append  # type: ignore[assignment]
    loss.backward()
    return seen.numels, len(calls)


@defect(torch_shows="empty all-reduces, 1 calls of synchronize")
def test_d10_no_empty_collective_and_no_synchronize(implementation):
    for numels, calls in run_workers(_traffic, 2, (implementation,)):
        empty = numels.count(0)
        assert not empty and not calls, f"{empty} empty all-reduces, {calls} calls of synchronize in one bucket"
        assert numels == [24, 24]


def _counted(worker: int, implementation: str) -> tuple[int, int, tuple[float, int, int]]:
    state = power_state(implementation)
    seen = Collectives.watch()
    averaged(state, power(implementation).powerSGD_hook, [[drawn("weight", 24, 24), torch.ones(24)]] * 5)
    return state.ledger.payload_bytes, sum(seen.sizes_bytes), state.compression_stats()


@defect(torch_shows="has no attribute 'ledger'")
def test_d11_bytes_are_counted(implementation):
    for ledger, sent, stats in run_workers(_counted, 2, (implementation,)):
        assert ledger == sent > 0
        assert stats == (600 / 72, 3 * 600, 3 * 72)


def _all_reduces_per_step(worker: int, implementation: str) -> float:
    """Train a model of one bucket."""
    model = DDP(mlp())
    optimizer = sgd(model)
    if implementation == "laconic":
        laconic.attach(laconic.power_sgd(rank=2, bits=None, rounds="alternating"), model, optimizer)
    else:
        model.register_comm_hook(power_state(implementation), power(implementation).powerSGD_hook)
    seen = Collectives.watch()
    train(model, optimizer, worker, range(2))
    seen.numels.clear()
    train(model, optimizer, worker, range(2, 4))
    return len(seen.numels) / 2


@defect(torch_shows="3.0 all-reduces per step")
def test_d12_one_all_reduce_per_step(implementation):
    for count in run_workers(_all_reduces_per_step, 2, (implementation,)):
        assert count == 1, f"{count} all-reduces per step"


class Unused(nn.Module):
    """One of two layers is not used in a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.use_left = True

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head((self.left if self.use_left else self.right)(x))
        return result


def _delayed(hook: Any) -> Any:
    """Return to DDP late, so that this worker would launch the hook's collectives before DDP's, and others after."""

    def delayed(state, bucket):
        future = hook(state, bucket)
        time.sleep(0.02)
        return future

    return delayed


def _unused(worker: int, implementation: str) -> Tensor:
    hook = power(implementation).powerSGD_hook
    hook = _delayed(hook) if worker == 1 else hook
    model = hooked(Unused(), power_state(implementation), hook, find_unused_parameters=True)
    optimizer = sgd(model)
    for step in range(30):
        model.module.use_left = (step + worker) % 2 == 0
        train(model, optimizer, worker, [step])
    return weights(model)


@defect(torch_shows="died with exit code|did not end within|raised:|worker 1 differs")
def test_d24_unused_parameters_do_not_race_with_the_hook(implementation):
    results = run_workers(_unused, 4, (implementation,), timeout_s=30)
    assert_equal_bits(results)
    assert results[0].isfinite().all()
