"""What torch keeps private of process groups, on this version of torch."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.algorithms.model_averaging.utils import average_parameters
from laconic.checkpoint.loading import lowest_and_highest
from laconic.comm.groups import subgroup_of
from laconic.torch_private.distributed import (
    LocalGroup,
    all_groups,
    backend_name,
    default_store,
    destroy_group,
    new_group,
    ordered_by_stream,
    reset_group_names,
    second_group,
    set_timeout,
)
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import run_workers

CPU = torch.device("cpu")


def _groups(worker: int, store: str) -> tuple[str, str, bool, float, list[float]]:
    """A group without a named backend has one for each kind of device."""
    dist.init_process_group(
        init_method=f"file://{store}", rank=worker, world_size=2, timeout=datetime.timedelta(seconds=33)
    )
    assert dist.group.WORLD is not None
    ours = second_group(dist.group.WORLD)
    default_store().set("key", "value")
    x = torch.tensor([float(worker)])
    dist.all_reduce(x, group=ours)
    timeout = ours._get_backend(CPU).options._timeout.total_seconds()
    named = str(dist.get_backend(dist.group.WORLD))
    return named, backend_name(ours, CPU), ordered_by_stream(ours), timeout, x.tolist()


def test_a_second_group_has_the_backends_and_the_timeout_of_the_first(tmp_path):
    for named, backend, by_stream, timeout, total in run_workers(_groups, 2, (str(tmp_path / "store"),), group=False):
        assert named != "gloo", "the name of the group does not tell the backend of a device"
        assert (backend, by_stream, timeout, total) == ("gloo", False, 33.0, [1.0])


def _train(worker: int, store: str, backend: str | None, plan: str, wrapped: bool) -> torch.Tensor:
    dist.init_process_group(backend, init_method=f"file://{store}", rank=worker, world_size=4)
    module = mlp()
    model: torch.nn.Module = DDP(module) if wrapped else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.plan(plan), model, optimizer):
        for step in range(4):
            x, y = batch(worker, step)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    average_parameters(module.parameters(), subgroup_of(dist.group.WORLD, 2))  # type: ignore[arg-type]
    assert lowest_and_highest(worker) == (0, 3)
    dist.barrier()
    return weights(module)


@pytest.mark.parametrize("backend", [None, "cpu:gloo"])
@pytest.mark.parametrize(
    ("plan", "wrapped"),
    [("power_sgd(rank=2)", True), ("hierarchical_sgd({2: 2, 4: 4})", False)],
    ids=str,
)
def test_a_group_without_the_name_of_one_backend_trains(tmp_path, backend, plan, wrapped):
    arguments = (str(tmp_path / "store"), backend, plan, wrapped)
    assert_equal_bits(run_workers(_train, 4, arguments, group=False))


def _remade(worker: int) -> list[str]:
    """Make and destroy groups of the same workers, again and again."""
    names: list[str] = []
    for _ in range(5):
        group = new_group([0, 1], "gloo")
        x = torch.tensor([float(worker)])
        dist.all_reduce(x, group=group)
        dist.barrier()
        names.append(group.group_name)
        destroy_group(group)
        destroy_group(group)
    return names


def test_groups_that_are_made_again_have_new_names():
    first, second = run_workers(_remade, 2)
    assert first == second and len(set(first)) == 5


def test_a_local_group_is_enough_for_ddp():
    groups = [LocalGroup(rank, 2) for rank in range(2)]
    assert [(group.rank(), group.size()) for group in groups] == [(0, 2), (1, 2)]
    for group in groups:
        model = DDP(torch.nn.Linear(2, 1), process_group=group)
        for step in range(3):  # DDP rebuilds its buckets after the first
            model.zero_grad()
            model(torch.full((1, 2), float(step))).sum().backward()
        assert model.module.weight.grad.tolist() == [[1.0, 1.0]]  # 2 / 2 workers: nothing comes from the other


def _make_groups(worker: int) -> list[str]:
    names: list[str] = []
    for _ in range(2):
        reset_group_names()
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        group = dist.new_group([0])
        assert isinstance(group, dist.ProcessGroup)
        assert all_groups() == [dist.group.WORLD, group]
        set_timeout(group, 7.0)
        assert group._get_backend(torch.device("cpu")).options._timeout == datetime.timedelta(seconds=7)
        names.append(group.group_name)
        dist.destroy_process_group()
    return names


def test_groups_that_are_made_again():
    [(first, second)] = run_workers(_make_groups, 1, group=False)
    assert first == second
