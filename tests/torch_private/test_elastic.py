"""The private names of torch behind `laconic.elastic`: run these with a new version of torch."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from laconic.torch_private.elastic import all_groups, reset_group_names, set_timeout
from tests.workers import run_workers


def _make_groups(worker: int) -> list[str]:
    names: list[str] = []
    for _ in range(2):
        reset_group_names()
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        group = dist.new_group([0])
        assert isinstance(group, dist.ProcessGroup)
        assert all_groups() == [dist.group.WORLD, group]
        set_timeout(group, 7.0)
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
        names.append(group.group_name)
        dist.destroy_process_group()
    return names


def test_groups_that_are_made_again():
    [(first, second)] = run_workers(_make_groups, 1, group=False)
    assert first == second
