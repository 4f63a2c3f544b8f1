"""The guard on the lab's GPT: a plan that is too weak is noticed and rescued, a healthy one is left alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.tools.lab import text
from laconic.tools.lab.models import GPT
from laconic.tools.lab.script import lr_share
from laconic.tools.lab.tasks import loss_of, validation_loss
from tests.workers import run_workers

WORKERS, STEPS, BATCH, CONTEXT = 4, 400, 2, 64


def _train(
    worker: int, plan: str, guard: Any, steps: int = STEPS, seed: int = 0
) -> tuple[float, list[str], list[laconic.Health]]:
    torch.set_num_threads(1)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("laconic.guard").addHandler(handler)
    train, validation = text.load(None, CONTEXT)
    model = GPT(layers=4, width=128, heads=4, seed=seed)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    seen: list[laconic.Health] = []
    with laconic.attach(
        laconic.plan(plan), ddp, optimizer, observers=[laconic.Guard(guard)] if guard else []
    ) as session:
        for step in range(1, steps + 1):
            optimizer.param_groups[0]["lr"] = 3e-3 * lr_share(step, steps)
            loss_of(ddp, text.batch(train, BATCH, CONTEXT, (seed, worker, step))).backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.health is not None and session.health not in seen:
                seen.append(session.health)
    return validation_loss(model, [text.batch(validation, 8, CONTEXT, (0, i)) for i in range(16)]), lines, seen


def _mean(results: list[Any]) -> float:
    return float(sum(loss for loss, _, _ in results) / len(results))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_plan_that_is_too_weak_is_noticed_and_rescued_and_a_healthy_one_is_left_alone():
    runs = {
        name: run_workers(_train, WORKERS, (plan, guard), timeout_s=900)
        for name, plan, guard in (
            ("ddp", "ddp()", "act"),
            ("alone", "alone()", None),
            ("weak", "power_sgd(rank=1)", "warn"),
            ("rescued", "power_sgd(rank=1)", "act"),
            ("healthy", "power_sgd(rank=32)", "act"),
        )
    }
    ddp, alone = _mean(runs["ddp"]), _mean(runs["alone"])
    kept = {name: (alone - _mean(results)) / (alone - ddp) for name, results in runs.items()}
    lines = {name: results[0][1] for name, results in runs.items()}
    assert not lines["ddp"] and not lines["healthy"]
    assert kept["healthy"] > 0.8
    assert len(lines["weak"]) == 1 and "power_sgd(rank=1, bits=4) is behind by" in lines["weak"][0]
    first = int(lines["rescued"][0].split()[2].rstrip(":"))
    assert first <= 50
    assert kept["weak"] < 0.3 and kept["rescued"] >= 0.8
    assert all(not each[1] for results in runs.values() for each in results[1:])  # one worker speaks
