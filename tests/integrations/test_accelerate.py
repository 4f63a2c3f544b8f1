"""Accelerate: the loops of its documentation with laconic in them, beside loops without Accelerate."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import laconic
from laconic.integrations import worker_files
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


# -------------------------------------------------------------------------------------- checkpoints


def _train_and_save(worker: int, plan: str, folder: str, resume: bool) -> tuple[list[float], list[Tensor]]:
    """Train 8 steps and save after the third; or load that, and train the rest."""
    from accelerate import Accelerator

    from laconic.integrations.accelerate import checkpoint

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, scheduler = accelerator.prepare(*make())
    session = laconic.attach(laconic.plan(plan), model, optimizer)
    checkpoint(accelerator, session)
    losses, batches = [], list(loader)
    if resume:
        with torch.no_grad():
            next(model.parameters()).fill_(7.0)  # all of it must come from the checkpoint
        accelerator.load_state(folder)
        assert session.step == 3
    for index, (x, y) in enumerate(batches):
        if index < session.step:
            continue
        loss = nn.functional.mse_loss(model(x + 0.01 * torch.randn_like(x)), y)  # generators are restored, too
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if session.step == 3 and not resume:
            accelerator.save_state(folder)
            assert sorted(p.name for p in Path(folder).glob("laconic*")) == [
                f"laconic_{each}.safetensors" for each in range(WORKERS)
            ]
        if session.step == STEPS:
            break
    session.detach()
    return losses, [p.detach().clone() for p in model.parameters()]


def _save_all(worker: int, folder: str, resume: bool) -> dict[str, Any]:
    torch.manual_seed(worker)
    return {plan: _train_and_save(worker, plan, f"{folder}/{i}", resume) for i, plan in enumerate(PLANS)}


def test_resuming_from_save_state_is_exact(tmp_path):
    whole = run_as_torchrun(_save_all, (str(tmp_path), False))
    resumed = run_as_torchrun(_save_all, (str(tmp_path), True))
    for worker in range(WORKERS):
        for plan in PLANS:
            (losses, weights), (again, others) = whole[worker][plan], resumed[worker][plan]
            assert losses[3:] == again, (plan, worker)
            assert all(map(torch.equal, weights, others)), (plan, worker)
    assert whole[0]["diloco(period=3)"][0] != whole[1]["diloco(period=3)"][0], "workers have data of their own"


def _raised(act: Any, *args: Any) -> str:
    try:
        act(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _load_what_does_not_fit(worker: int, folder: str) -> list[str]:
    from accelerate import Accelerator

    from laconic.integrations.accelerate import checkpoint

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*make()[:2])
    accelerator.save_state(f"{folder}/without")
    session = laconic.attach(laconic.power_sgd(rank=1, min_compression=0), model, optimizer)
    checkpoint(accelerator, session)
    for name in ("saved", "foreign", "mixed"):
        accelerator.save_state(f"{folder}/{name}")
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    if worker == 1:
        (Path(folder) / "foreign" / "laconic_1.safetensors").write_bytes(b"what safetensors does not know")
    else:
        worker_files.save_own(Path(folder) / "mixed", session)  # and worker 1 was killed before it could
    dist.barrier()
    errors = [_raised(accelerator.load_state, f"{folder}/{name}") for name in ("without", "foreign", "mixed")]
    errors.append(_raised(checkpoint, accelerator, session))
    session.detach()
    checkpoint(accelerator, laconic.attach(laconic.ddp(), model, optimizer))  # the name is free again
    return errors


def _load_alone(worker: int, folder: str) -> str:
    from accelerate import Accelerator

    from laconic.integrations.accelerate import checkpoint

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*make()[:2])
    accelerator.load_state(f"{folder}/saved")  # the way out that the error gives
    checkpoint(accelerator, laconic.attach(laconic.power_sgd(rank=1, min_compression=0), model, optimizer))
    return _raised(accelerator.load_state, f"{folder}/saved")


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    first, second = run_as_torchrun(_load_what_does_not_fit, (str(tmp_path),))
    way_out = "with residuals of zero, call accelerator.load_state before checkpoint(accelerator, session)."
    assert re.fullmatch(
        rf"CheckpointError: .*without has no laconic_0.safetensors: it was saved without laconic.*{re.escape(way_out)}",
        first[0],
    )
    assert "another worker could not load its state" in first[1]
    assert "laconic_1.safetensors cannot be read" in second[1] and way_out in second[1]
    assert first[2] == second[2] and "the workers' files are of steps 0 to 1" in first[2]
    assert "name='laconic'): another session writes these files" in first[3]
    (alone,) = run_as_torchrun(_load_alone, (str(tmp_path),), workers=1)
    assert "was saved by 2 workers, and there are 1" in alone and "Start 2 workers" in alone and way_out in alone


# -------------------------------------------------------------------------------------- skipped steps


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


def _save_slowly(worker: int, folder: str) -> int:
    from accelerate import Accelerator

    from laconic.integrations.accelerate import checkpoint

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*make()[:2])
    session = laconic.attach(laconic.ddp(), model, optimizer, timeout_s=2.0)
    checkpoint(accelerator, session)
    for step in range(3):
        accelerator.backward(model(torch.ones(1, 8)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            accelerator.save_state(folder)
            time.sleep(4.0 * (worker == 0))  # a large model takes as long
    return session.step


def test_the_others_wait_while_the_first_worker_writes_the_model(tmp_path):
    assert run_as_torchrun(_save_slowly, (str(tmp_path),)) == [3, 3]


def test_the_page_runs(tmp_path):
    for _ in range(2):  # the second time it loads what the first has saved
        results = run_page(PAGE, "accelerate", tmp_path)
    assert [each["step"] for each in results] == [32, 32]
    whole = 4 * (16 * 64 + 64 + 64 + 1)
    assert all(0 < each["sent"] < 8 * whole / 10 for each in results)
