"""Groups inside the world: who averages what with whom, and what it costs."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import run_workers

LEVELS = {2: 2, 4: 4, 8: 8}
STEPS = 16
SIZE = 6


def _gradients(worker: int, step: int) -> NDArray[np.float64]:
    """Multiples of 1/4: their means over 2, 4 and 8 workers are exact in any order of summation."""
    rng = np.random.default_rng(100 * step + worker)
    return rng.integers(-16, 16, SIZE) / 4


def _replayed(workers: int, levels: dict[int, int]) -> NDArray[np.float64]:
    """What hierarchical SGD is, in plain NumPy: [step, worker, weight]."""
    w = np.zeros((workers, SIZE))
    trace = []
    for step in range(1, STEPS + 1):
        w -= np.stack([_gradients(worker, step) for worker in range(workers)])
        due = [size for period, size in levels.items() if step % period == 0]
        if due:
            for first in range(0, workers, max(due)):
                w[first : first + max(due)] = w[first : first + max(due)].mean(0)
        trace.append(w.copy())
    return np.stack(trace)


def _nested(worker: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    ours, twins = [], []
    model = nn.Linear(SIZE, 1, bias=False, dtype=dtype)
    twin = nn.Linear(SIZE, 1, bias=False, dtype=dtype)
    for each in (model, twin):
        nn.init.zeros_(each.weight)
    optimizer, other = torch.optim.SGD(model.parameters(), lr=1.0), torch.optim.SGD(twin.parameters(), lr=1.0)
    averager = HierarchicalModelAverager(OrderedDict(LEVELS))
    averager.step = 1  # its phase counts from 0
    with laconic.attach(laconic.hierarchical_sgd(LEVELS), model, optimizer):
        for step in range(1, STEPS + 1):
            for each in (model, twin):
                each.weight.grad = torch.from_numpy(_gradients(worker, step)).to(dtype)[None]
            optimizer.step()
            ours.append(model.weight.detach().clone())
            other.step()
            averager.average_parameters(twin.parameters())
            twins.append(twin.weight.detach().clone())
    return torch.cat(ours), torch.cat(twins)


def test_hierarchical_averaging_is_its_plain_model_bit_for_bit():
    expected = torch.from_numpy(_replayed(8, LEVELS))
    for worker, (ours, twins) in enumerate(run_workers(_nested, 8, (torch.float64,))):
        assert torch.equal(ours, expected[:, worker])
        assert torch.equal(twins, expected[:, worker])


def _post_local(worker: int, wrapped: bool) -> tuple[list[Tensor], dict[str, Any], int]:
    module = mlp()
    model = DDP(module) if wrapped else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = laconic.attach(laconic.post_local_sgd(start=3, period=4, group=2), model, optimizer)
    trace = []
    for step in range(1, 11):
        F.cross_entropy(model(batch(worker, step)[0]), batch(worker, step)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        trace.append(weights(module))
    session.detach()
    sums = {
        f"{level}/{phase}": sum(
            e.payload_bytes for e in session.ledger.entries if (e.level, e.phase) == (level, phase) and e.step > 2
        )
        for level in ("world", "groups of 2")
        for phase in ("gradient", "weights")
    }
    return trace, sums, 4 * sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "bare"])
def test_post_local_sgd_in_two_groups(wrapped):
    results = run_workers(_post_local, 4, (wrapped,))
    for step in range(1, 11):
        now = [trace[step - 1] for trace, _, _ in results]
        assert_equal_bits(now[:2])
        assert_equal_bits(now[2:])
        apart = step >= 3 and (step - 2) % 4 != 0
        assert torch.equal(now[0], now[2]) is not apart, f"step {step}"
    for _, sums, size in results:
        assert sums["groups of 2/gradient"] == 8 * size  # steps 3 to 10
        assert sums["world/weights"] == 2 * size  # steps 6 and 10
        assert sums["world/gradient"] == sums["groups of 2/weights"] == 0


def _grouped_gradients(worker: int) -> tuple[Tensor, Tensor]:
    model, alone = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.diloco(period=100, group=2), model, optimizer):
        x, y = batch(worker, 1)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    losses = [F.cross_entropy(alone(batch(each, 1)[0]), batch(each, 1)[1]) for each in (worker & 2, worker | 1)]
    torch.stack(losses).mean().backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    return weights(model), weights(alone)


def test_inside_a_group_gradients_are_those_of_the_group():
    for ours, expected in run_workers(_grouped_gradients, 4):
        torch.testing.assert_close(ours, expected)


def _levels_from(worker: int, how: str) -> tuple[Tensor, list[str]]:
    plan = laconic.Plan(laconic.Nested({1: 2, 2: 4}))
    levels: Any = None
    if how == "mesh":
        levels = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "gpus"))
    elif how == "groups":  # not neighbours: 0 with 2, 1 with 3
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        levels = [pairs[worker % 2], dist.group.WORLD]
    elif how == "machine":
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        plan = laconic.post_local_sgd(period=2, group="machine")
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with laconic.attach(plan, model, optimizer, levels=levels) as session:
        model.weight.grad = torch.full((1, 1), -float(worker), dtype=torch.float64)
        optimizer.step()
        return model.weight.detach().clone(), sorted(session.ledger.totals(by="level"))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("sizes", [0.5, 0.5, 2.5, 2.5]),
        ("mesh", [0.5, 0.5, 2.5, 2.5]),
        ("groups", [1.0, 2.0, 1.0, 2.0]),
        ("machine", [0.5, 0.5, 2.5, 2.5]),
    ],
)
def test_groups_come_from_sizes_a_mesh_process_groups_or_the_launcher(how, expected):
    results = run_workers(_levels_from, 4, (how,))
    assert [float(w) for w, _ in results] == expected
    assert all("groups of 2" in levels for _, levels in results)


def _refused(worker: int, text: str) -> str:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError) as error:
        laconic.attach(laconic.plan(text), model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hierarchical_sgd({2: 3, 4: 6})", "groups of 3, and 4 workers cannot be divided so"),
        ("hierarchical_sgd({2: 2})", "last groups have 2 workers, and there are 4"),
        ("post_local_sgd(period=4, group=3)", "groups of 3, and 4 workers cannot be divided so"),
    ],
)
def test_groups_that_do_not_fit_the_world_are_refused_with_the_numbers(text, said):
    assert all(said in error for error in run_workers(_refused, 4, (text,)))


def _wrong_levels(worker: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="is not a part of the next"):
        laconic.attach(laconic.ddp(), model, optimizer, levels=[dist.group.WORLD, pairs[worker // 2]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="asks for groups of 2, and levels= has groups of 4"):
        laconic.attach(laconic.post_local_sgd(period=2, group=2), model, optimizer, levels=[dist.group.WORLD])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="give a DeviceMesh, or this worker's process groups"):
        laconic.attach(laconic.ddp(), model, optimizer, levels=[2])  # type: ignore[list-item]


def test_levels_that_do_not_nest_are_refused():
    run_workers(_wrong_levels, 4)


def _two_worlds(worker: int) -> float:
    """Two data-parallel groups in one world, each with its hierarchy: none waits for the other."""
    halves = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])]
    group = halves[worker // 4]
    if worker >= 4:
        return 0.0  # the others do not attach at all
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with laconic.attach(laconic.hierarchical_sgd({1: 2, 2: 4}), model, optimizer, group=group):
        model.weight.grad = torch.full((1, 1), -float(worker))
        optimizer.step()
        return float(model.weight.detach())


def test_a_hierarchy_inside_a_part_of_the_world():
    assert run_workers(_two_worlds, 8)[:4] == [0.5, 0.5, 2.5, 2.5]
