"""Waiting in slices: what ends late has ended well, what broke has not."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from laconic import LostWorkerError
from laconic.comm.timeout import SLICE, CollectiveTimeout


class Work(dist.Work):
    """A collective whose first slice runs out, and that has ended by then: well, or with an error."""

    def __init__(self, error: str | None) -> None:
        super().__init__()
        self.error, self.waits = error, 0

    def wait(self, timeout: timedelta = SLICE) -> bool:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.waits > 0


@pytest.fixture
def timeout() -> Iterator[CollectiveTimeout]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield CollectiveTimeout(dist.group.WORLD)
    dist.destroy_process_group()


def test_a_collective_that_ends_just_after_its_slice_has_ended_well(timeout):
    work = Work(None)
    timeout.wait(work, "step 1")
    assert work.waits == 2


def test_one_that_broke_just_after_its_slice_is_told_with_its_own_error(timeout):
    with pytest.raises(LostWorkerError, match=r"step 1: the connection broke \(Connection closed by peer\)"):
        timeout.wait(Work("Connection closed by peer"), "step 1")
