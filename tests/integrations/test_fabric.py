"""laconic under Lightning's Fabric: `laconic.attach` takes what `fabric.setup` returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import laconic
from laconic import checkpoint
from tests.workers import run_workers

pytest.importorskip("lightning")

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy

from tests.integrations.lightning_runs import BATCHES, Net, as_under_torchrun, by_hand, flat, loader

pytestmark = pytest.mark.frameworks

COMPRESSED, LOCAL = "power_sgd(rank=2, min_compression=0)", "diloco(period=3)"


def train(
    plan: str | None, epochs: int = 2, *, closure: bool = False, resume: str = "", save: str = "", **fabric: Any
) -> tuple[list[float], torch.Tensor, Any]:
    """Train as `by_hand` does, two batches a step, clipped, under Fabric."""
    torch.manual_seed(0)
    made = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(), **fabric)
    made.launch()
    net = Net()
    model, optimizer = made.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    session = None if plan is None else laconic.attach(laconic.plan(plan), model, optimizer)
    first = 0
    if resume and session is not None:
        saved = checkpoint.load(resume).state
        made.load(f"{resume}/fabric.ckpt", {"scheduler": scheduler})
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        session.load_state_dict(saved["session"])
        first = saved["epoch"]
    sampler: DistributedSampler[Any] = DistributedSampler(loader().dataset, shuffle=True)
    batches = made.setup_dataloaders(DataLoader(loader().dataset, batch_size=8, sampler=sampler))
    batches._num_iter_calls = first  # Fabric's own count of epochs, which seeds the sampler
    losses = []
    for _ in range(first, epochs):
        for index, (x, y) in enumerate(batches):
            last = index % 2 == 1 or index + 1 == BATCHES

            def evaluate(x: torch.Tensor = x, y: torch.Tensor = y, last: bool = last) -> Any:
                loss = (model(x) - y).square().mean()
                made.backward(loss / 2)
                losses.append(loss.item())
                if last:
                    made.clip_gradients(model, optimizer, max_norm=0.1)
                return loss

            with made.no_backward_sync(model, enabled=not last):
                if last and closure:
                    optimizer.step(evaluate)
                else:
                    evaluate()
            if last and not closure:
                optimizer.step()
            if last:
                optimizer.zero_grad()
        scheduler.step()
    if save and session is not None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "session": session.state_dict()}
        checkpoint.save(save, {**state, "epoch": epochs}, step=session.step)
        made.save(f"{save}/fabric.ckpt", {"scheduler": scheduler})
    if session is not None:
        session.detach()
    return losses, flat(net), session


def job(worker: int, folder: str) -> None:
    as_under_torchrun(worker, 2)
    losses, weights, _ = train(None)
    for closure in (False, True):
        for plan in ("ddp()", COMPRESSED, LOCAL):
            expected = (losses, weights) if plan == "ddp()" else by_hand(plan, accumulate=2, clip=0.1)[:2]
            ours = train(plan, closure=closure)
            assert ours[0] == expected[0] and torch.equal(ours[1], expected[1]), (plan, closure)
            assert ours[2].step == 6
    assert train(None, precision="bf16-mixed")[0] == train("ddp()", precision="bf16-mixed")[0]
    for number, plan in enumerate((COMPRESSED, LOCAL)):
        place = f"{folder}/{number}"
        whole = train(plan, 3)
        train(plan, 1, save=place)
        after = train(plan, 3, resume=place)
        assert after[0] == whole[0][BATCHES:] and torch.equal(after[1], whole[1]), plan


def test_fabric_trains_as_a_loop_does_and_resumes(tmp_path):
    run_workers(job, 2, args=(str(tmp_path),), timeout_s=150)


def hidden(worker: int) -> None:
    as_under_torchrun(worker, 2)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy())
    fabric.launch()
    net = nn.Linear(4, 4)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="a DistributedDataParallel holds the parameters of this Linear"):
        laconic.attach(laconic.ddp(), net, optimizer)
    assert model is not net


def test_the_module_inside_is_refused():
    run_workers(hidden, 2, timeout_s=60)
