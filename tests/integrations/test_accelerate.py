"""Accelerate: the loops of its documentation with laconic in them, beside loops without Accelerate."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import laconic
from tests.integrations.torchrun_env import run_as_torchrun, run_page

pytestmark = pytest.mark.frameworks
pytest.importorskip("accelerate")

PAGE = Path(__file__).parents[2] / "docs" / "accelerate.md"
PLANS = (
    "ddp()",
    "power_sgd(rank=1, min_compression=0)",
    "quantized_ddp(bits=4)",
    "post_local_sgd(start=3, period=2)",
    "diloco(period=3)",
    "streaming_diloco(period=4, fragments=2, delay=1)",
)
STEPS, ACCUMULATED, WORKERS = 8, 2, 2


@dataclass
class Trained:
    """What one worker saw of a training."""

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes by phase."""

    def note(self, loss: Tensor, optimizer: Any) -> None:
        self.losses.append(float(loss.detach()))
        self.rates.append(optimizer.param_groups[0]["lr"])

    def end(self, model: nn.Module, session: laconic.Session | None) -> Trained:
        self.weights = [p.detach().clone() for p in model.parameters()]
        if session is not None:
            session.state_dict()  # waits for a fragment in flight
            self.sent = {phase: total.wire_bytes for phase, total in session.ledger.totals(by="phase").items()}
        return self

    def equals(self, other: Trained) -> bool:
        return (self.losses, self.rates) == (other.losses, other.rates) and all(
            map(torch.equal, self.weights, other.weights)
        )


def make() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], LambdaLR]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    x = torch.randn(4 * WORKERS * STEPS * ACCUMULATED, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=4)
    return model, optimizer, loader, LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))


def with_accelerate(plan: str | None) -> Trained:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model, optimizer, loader, scheduler = accelerator.prepare(*make())
    session = None if plan is None else laconic.attach(laconic.plan(plan), model, optimizer)
    seen = Trained()
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen.note(loss, optimizer)
    done = seen.end(model, session)
    assert accelerator.gather_for_metrics(loss.detach()).shape == (WORKERS,)
    if session is not None:
        assert session.step == STEPS
        session.detach()
    return done


def by_hand(plan: str, worker: int) -> Trained:
    module, optimizer, loader, scheduler = make()
    model = DDP(module)
    session = laconic.attach(laconic.plan(plan), model, optimizer)
    seen = Trained()
    own = list(loader)[worker::WORKERS]  # batches go round, as Accelerate deals them
    for index, (x, y) in enumerate(own):
        last = (index + 1) % ACCUMULATED == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.mse_loss(model(x), y)
            (loss / ACCUMULATED).backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            for _ in range(WORKERS):  # Accelerate counts the steps of a single worker
                scheduler.step()
            optimizer.zero_grad()
        seen.note(loss, optimizer)
    done = seen.end(model, session)
    session.detach()
    return done


def _both(worker: int) -> dict[str, tuple[Trained, Trained]]:
    bare = with_accelerate(None)
    compared = {plan: (with_accelerate(plan), by_hand(plan, worker)) for plan in PLANS}
    return {**compared, "without laconic": (bare, compared["ddp()"][0])}


def test_loops_with_accumulation_and_clipping_train_as_without_accelerate():
    first, second = run_as_torchrun(_both)
    shapes = dict(make()[0].named_parameters())
    for name in first:
        for results in (first, second):
            with_, hand = results[name]
            assert with_.equals(hand), name
            assert with_.sent == hand.sent or name == "without laconic", name
    for plan in PLANS:
        made = laconic.plan(plan)
        if made.local:
            continue
        planned = STEPS * laconic.sent_bytes(made, shapes, WORKERS)
        assert first[plan][0].sent["gradient"] == planned, plan
        assert set(first[plan][0].sent) <= {"gradient", "control"}, plan
    whole = 4 * sum(p.numel() for p in shapes.values())
    local = first["post_local_sgd(start=3, period=2)"][0]
    assert local.sent["gradient"] == 2 * whole and local.sent["weights"] == 3 * whole  # steps 1, 2 and 4, 6, 8
    assert len(set(local.rates)) == STEPS + 1, "the scheduler steps where the optimizer does"


def _overflow(worker: int, plan: str, scaled: bool) -> dict[str, Any]:
    """Train four steps; in the second, worker 1 alone has gradients that are not finite."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    if scaled:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # Accelerate makes one only on a GPU
    model, optimizer, _, scheduler = accelerator.prepare(*make())
    session = laconic.attach(laconic.plan(plan), model, optimizer)
    skipped, rates, moved = [], [scheduler.get_last_lr()[0]], []
    for step in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        loss = model(torch.full((2, 8), 0.1 * (step + 1) * (worker + 1))).square().mean()
        accelerator.backward(loss * (float("inf") if (step, worker) == (1, 1) else 1.0))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        rates.append(scheduler.get_last_lr()[0])
        moved.append(not all(map(torch.equal, before, model.parameters())))
    session.detach()
    scale = accelerator.scaler.get_scale() if scaled else 1.0
    return {"skipped": skipped, "waited": [a == b for a, b in pairwise(rates)], "moved": moved, "scale": scale}


def _overflows(worker: int) -> list[dict[str, Any]]:
    plans = ("ddp()", "power_sgd(rank=1, min_compression=0)", "post_local_sgd(period=3)")
    return [_overflow(worker, plan, True) for plan in plans] + [_overflow(worker, "ddp()", False)]


def test_skipped_steps_are_known_to_accelerate():
    first, second = run_as_torchrun(_overflows)
    only_second = {"skipped": [False, True, False, False], "waited": [False, True, False, False]}
    everywhere = {**only_second, "moved": [True, False, True, True], "scale": 2.0}
    assert first[:2] == second[:2] == [everywhere] * 2, "gradients are averaged, so all workers skip"
    assert second[2] == everywhere
    assert first[2] == {"skipped": [False] * 4, "waited": [False] * 4, "moved": [True] * 4, "scale": 4.0}
    assert first[3] == second[3] == {**everywhere, "scale": 1.0}, "NaN skips without a GradScaler, too"


def test_the_page_runs(tmp_path):
    for _ in range(2):  # the second time it loads what the first has saved
        results = run_page(PAGE, "accelerate", tmp_path)
    assert [each["step"] for each in results] == [32, 32]
    whole = 4 * (16 * 64 + 64 + 64 + 1)
    assert all(0 < each["sent"] < 8 * whole / 10 for each in results)
