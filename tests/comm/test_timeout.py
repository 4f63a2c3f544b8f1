"""Waiting in slices: what ends late has ended well, what broke has not."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

import laconic
from laconic import LostWorkerError
from laconic.comm.timeout import SLICE, CollectiveTimeout
from laconic.torch_private.distributed import default_store
from tests.counting import CountingStore


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


def test_the_time_that_the_store_takes_to_answer_is_not_that_of_the_collective(timeout, monkeypatch):
    work = Work(None)
    monkeypatch.setattr(work, "is_completed", lambda: work.waits > 1)
    timeout._limit_s = 0.1

    def hang(name: str, *args: Any) -> Any:
        time.sleep(0.3)
        raise RuntimeError("the store has not responded")

    monkeypatch.setattr(timeout, "_call_store", hang)
    timeout.wait(work, "step 1")
    assert work.waits == 2


def test_one_that_broke_just_after_its_slice_is_told_with_its_own_error(timeout):
    with pytest.raises(LostWorkerError, match=r"step 1: the connection broke \(Connection closed by peer\)"):
        timeout.wait(Work("Connection closed by peer"), "step 1")


@pytest.mark.parametrize("timeout_s", [0, -1, 0.0, math.inf, -math.inf, math.nan, True, "60"])
def test_a_timeout_that_is_not_a_number_of_seconds_is_refused(timeout_s: Any) -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="it must be a number of seconds above 0, such as 60") as error:
        laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters()), timeout_s=timeout_s)
    assert str(error.value).startswith(f"attach(timeout_s={timeout_s!r}): ")


def test_naming_a_lost_worker_takes_few_calls_of_the_store(monkeypatch):
    """Every worker does it at once: a call for each worker would be workers² calls."""
    monkeypatch.setattr("laconic.comm.timeout.RESPONSE_S", 0.0)
    store = CountingStore(HashStore())
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 64, group_name="many")
    for worker in set(range(1, 64)) - {41}:
        PrefixStore("laconic/many", default_store()).set(f"here/{worker}", "")
    store.calls.clear()
    with pytest.raises(LostWorkerError) as lost:
        CollectiveTimeout(group).wait(Work("Connection closed by peer"), "step 1")
    dist.destroy_process_group()
    assert lost.value.missing == [41]
    assert store.calls.total() < 20
