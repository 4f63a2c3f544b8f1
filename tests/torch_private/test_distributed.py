"""What torch keeps private of process groups, on this version of torch."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

import laconic
from laconic.torch_private.distributed import backend_name, default_store, ordered_by_stream, second_group
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


def _train(worker: int, store: str) -> torch.Tensor:
    dist.init_process_group(init_method=f"file://{store}", rank=worker, world_size=2)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.power_sgd(rank=2), model, optimizer):
        for step in range(3):
            x, y = batch(worker, step)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def test_a_group_without_a_named_backend_trains(tmp_path):
    assert_equal_bits(run_workers(_train, 2, (str(tmp_path / "store"),), group=False))
