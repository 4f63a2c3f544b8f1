"""Local steps under Accelerate and the Trainer, at the network interface: what the frameworks send by themselves."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import laconic
from tests.integrations.test_transformers import add, gpt, make_trainer, text
from tests.namespaces import needs_root, run_on_hosts

pytestmark = [pytest.mark.frameworks, *needs_root]
pytest.importorskip("transformers")

PLAN, STEPS = "post_local_sgd(period=1000)", 14
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def sent() -> int:
    return int(COUNTER.read_text())


class Rows(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(text() * 20)


def accelerate_steps() -> list[int]:
    """Return the bytes that left this host between one step and the next: batch, forward, backward, step."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    x = torch.randn(2 * 2 * STEPS * 4, 256)
    loader = DataLoader(TensorDataset(x), batch_size=4, shuffle=True)
    module = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(module.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    model, optimizer, loader, schedule = accelerator.prepare(module, optimizer, loader, schedule)
    session = laconic.attach(laconic.plan(PLAN), model, optimizer)
    counts = []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            counts.append(sent())
    accelerator.wait_for_everyone()
    session.detach()
    return counts


def trainer_steps(data: Any, **options: Any) -> list[int]:
    from transformers import TrainerCallback

    counts: list[int] = []

    class Counts(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            counts.append(sent())

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, gpt(), data, max_steps=STEPS, **{"logging_strategy": "no", **options})
        add(trainer, PLAN)
        trainer.add_callback(Counts())
        trainer.train()
    return counts


def worker() -> None:
    """Train in each way; print the bytes of each step after the first few."""
    torch.set_num_threads(1)
    import transformers.trainer  # noqa: F401

    gc.freeze()  # a Trainer collects garbage when it begins
    quiet = {"average_tokens_across_devices": False}
    found = {
        "accelerate": accelerate_steps(),
        "trainer": trainer_steps(text(), **quiet),
        "trainer, average_tokens_across_devices": trainer_steps(text()),
        "trainer, include_num_input_tokens_seen": trainer_steps(text(), include_num_input_tokens_seen="all", **quiet),
        "trainer, logging_steps=1": trainer_steps(text(), logging_strategy="steps", logging_steps=1, **quiet),
        "trainer, IterableDataset": trainer_steps(Rows(), **quiet),
        "trainer, IterableDataset without dispatch_batches": trainer_steps(
            Rows(), accelerator_config={"dispatch_batches": False}, **quiet
        ),
    }
    sys.stdout.write("\n" + json.dumps({name: _differences(counts) for name, counts in found.items()}))


def _differences(counts: list[int]) -> list[int]:
    return [after - before for before, after in pairwise(counts[3:])]


def test_local_steps_send_nothing_but_what_the_frameworks_send():
    code = "from tests.integrations.test_local_steps import worker; worker()"
    for out in run_on_hosts(2, code, timeout_s=150):
        found: dict[str, list[int]] = json.loads(out.splitlines()[-1])
        without = ("accelerate", "trainer", "trainer, IterableDataset without dispatch_batches")
        for name, steps in found.items():
            assert len(steps) == STEPS - 4
            if name in without:
                # Neighbour discovery may come between two steps.
                assert statistics.median(steps) == 0 and sum(steps) < 1000, f"{name}: {steps}"
            else:
                assert statistics.median(steps) > 40, f"{name}: {steps}"
