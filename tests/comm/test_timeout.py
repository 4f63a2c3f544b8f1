"""Waiting in slices: what ends late has ended well, what broke has not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from laconic.comm.timeout import SLICE, CollectiveTimeout, LostWorkerError


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


class Parts(Work):
    """A collective of ten parts, each of which takes 0.15 s to come, if any comes."""

    def __init__(self, any_comes: bool) -> None:
        super().__init__(None)
        self.any_comes, self.come = any_comes, 0

    def wait(self, timeout: timedelta = SLICE) -> bool:
        time.sleep(0.15)
        self.come += self.any_comes
        if self.come < 10:
            raise RuntimeError("still on their way")
        return True

    def is_completed(self) -> bool:
        return self.come >= 10


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


def test_of_many_parts_each_has_its_time(timeout):
    timeout._limit_s = 1.0
    work = Parts(any_comes=True)
    timeout.wait(work, "step 1")
    assert work.come == 10
    with pytest.raises(LostWorkerError, match="no result for"):
        timeout.wait(Parts(any_comes=False), "step 2")
