"""Means in one process have the bits of gloo's collectives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic.checks.digests import digest
from laconic.comm.queue import CollectiveQueue
from laconic.exchange import Exchange, Mean
from laconic.ledger import Ledger
from laconic.tools.simulate.in_process import gloo_mean
from tests.workers import run_workers

SIZES = (1, 7, 1000, 262_147, 700_001)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _rows(size: int, dtype: torch.dtype, workers: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(size)
    return [torch.randn(size, generator=draw).to(dtype) for _ in range(workers)]


def _mean(x: Tensor, wide: bool) -> Exchange[Tensor]:
    return (yield Mean(x, wide=wide))


def _means_of_gloo(worker: int, workers: int) -> list[Tensor]:
    queue = CollectiveQueue(torch.distributed.group.WORLD, Ledger())
    means = []
    for size in SIZES:
        for dtype in DTYPES:
            for wide in (False, True):
                means.append(queue.run(_mean(_rows(size, dtype, workers)[worker], wide), "test").clone())
    queue.close()
    return [digest(mean) for mean in means]


@pytest.mark.parametrize("workers", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))])
def test_means_have_the_bits_of_gloo(workers):
    expected = iter(run_workers(_means_of_gloo, workers, (workers,))[0])
    for size in SIZES:
        for dtype in DTYPES:
            for wide in (False, True):
                mean = gloo_mean([Mean(row, wide) for row in _rows(size, dtype, workers)])
                assert digest(mean) == next(expected), (size, dtype, wide)
