"""Long runs: memory, descriptors and threads do not grow with the number of steps."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.guard import SKETCH
from tests.session.models import batch, mlp
from tests.workers import run_workers

STEPS, EVERY = 2_000, 400
"""Samples are taken at multiples of the plan's period, 400 steps apart or more: the same ones are in flight."""
MOST_SKETCHES = 8
"""Sketches of gradients that a guard holds until they are gathered. At a sample there are more or fewer."""
MOST_GROWTH = 2 << 20
"""Bytes by which a process may grow between the second sample and the last: of the allocator, not of tensors."""


@dataclass(frozen=True)
class Sample:
    """What a process holds."""

    tensors: int
    """Without sketches."""
    tensor_bytes: int
    sketches: int
    descriptors: int
    threads: int
    memory: int


def _sample() -> Sample:
    gc.collect()
    every = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    tensors = [each for each in every if each.shape != (SKETCH,)]
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return Sample(
        len(tensors),
        sum(each.nbytes for each in tensors),
        len(every) - len(tensors),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        1024 * int(status["RssAnon"].split()[0]),  # without pages of files, which the system drops and reads again
    )


def _sample_at_rest() -> Sample:
    """Sample when the queue's thread has dropped what it has just averaged: on a busy machine this takes a while."""
    found = _sample()
    for _ in range(100):
        time.sleep(0.05)
        before, found = found, _sample()
        if replace(before, memory=0) == replace(found, memory=0):
            break
    return found


def _long(worker: int, plan: str, ddp: bool, options: Mapping[str, Any]) -> list[Sample]:
    logging.getLogger("laconic").setLevel(logging.ERROR)
    model: nn.Module = DistributedDataParallel(mlp()) if ddp else mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ledger = laconic.Ledger(keep=100)  # full at the first sample
    samples = []
    with laconic.attach(plan, model, optimizer, ledger=ledger, **options) as session:
        every = -(-EVERY // session.plan.schedule.period) * session.plan.schedule.period
        for step in range(1, STEPS + 1):
            x, y = batch(worker, step % 50)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.report(loss=loss.detach())
            if step % every == 0:
                session.state_dict()  # waits for fragments in flight
                del loss
                samples.append(_sample_at_rest())
                session.gather([step])  # whoever ends first closes connections of the others
    return samples


LATE = "Plan(Streaming(4, 4, delay=1), ErrorFeedback(Quantized(1)))"
"""A fragment is in flight after every step."""
SLOW = ['frugal("120x", delay=1)', "power_sgd()"]
NIGHTLY = [
    "ddp()",
    "alone()",
    "quantized_ddp()",
    "power_sgd(rank=1)",
    "post_local_sgd(period=4)",
    "post_local_sgd(period=4, group=2)",
    "hierarchical_sgd({2: 2, 4: 4})",
    "diloco(period=4)",
    "diloco(period=4, lr=0.7, momentum=0.9)",
    "streaming_diloco(period=8)",
    LATE,
    "Plan(Streaming(4, 4, delay=3, mix=0.5), ErrorFeedback(Quantized(2)))",
    "qsr(0.002)",
    "sparse_loco()",
    'frugal("8x")',
    'frugal("60x")',
    'frugal("300x")',
]


@pytest.mark.parametrize("ddp", [False, True], ids=["bare", "ddp"])
@pytest.mark.parametrize(
    "plan",
    [pytest.param(text, marks=pytest.mark.slow) for text in SLOW]
    + [pytest.param(text, marks=pytest.mark.nightly) for text in NIGHTLY],
)
@pytest.mark.parametrize("guard", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["guard", "no guard"])
@pytest.mark.timeout(900)
def test_nothing_grows_over_2000_steps(plan, ddp, guard):
    options = {"observers": [laconic.Guard("warn")]} if guard else {}
    workers = 4 if "group" in plan or "hierarchical" in plan else 2
    for samples in run_workers(_long, workers, (plan, ddp, options), timeout_s=600):
        held = {(each.tensors, each.tensor_bytes, each.descriptors, each.threads) for each in samples[1:]}
        assert len(held) == 1, samples
        assert max(each.sketches for each in samples) <= MOST_SKETCHES, samples
        assert samples[-1].memory - samples[1].memory < MOST_GROWTH, samples
