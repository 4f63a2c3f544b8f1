"""Runs of Lightning's Trainer in worker processes, as under torchrun; and a loop by hand to compare with."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import laconic
from tests.workers import PRELOADED

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

from laconic.integrations.lightning import Laconic

PRELOADED.append("lightning.pytorch")

BATCHES = 5
"""Batches of each worker in an epoch: no multiple of the periods below, so that an epoch ends between two syncs."""


class Net(pl.LightningModule):  # type: ignore[misc]
    """A small regression. `losses` are those of this worker."""

    def __init__(self, lr: float = 0.1, norm: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32) if norm else nn.Identity(), nn.Tanh(), nn.Linear(32, 1)
        )
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def loss(self, batch: Sequence[Tensor]) -> Any:
        x, y = batch
        loss = (self(x) - y).square().mean()
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class Manual(Net):
    """The same with manual optimization and two optimizers, without a schedule of the learning rate."""

    def __init__(self, lr: float = 0.1, norm: bool = True) -> None:
        super().__init__(lr, norm)
        self.automatic_optimization = False

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()
        second.step()

    def configure_optimizers(self) -> Any:
        parts = [list(self.net[0].parameters()), list(self.net[1:].parameters())]
        return [torch.optim.AdamW(part, lr=self.hparams["lr"]) for part in parts]


def loader() -> DataLoader[Any]:
    """The batches of all workers: Lightning gives each its share, by a sampler that shuffles by epoch."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2 * 8 * BATCHES, 16, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=8, shuffle=True)


@dataclass
class Run:
    """What one worker saw of a run."""

    losses: list[float]
    weights: Tensor
    session: Any
    trainer: Any

    def same(self, other: Run) -> bool:
        return self.losses == other.losses and torch.equal(self.weights, other.weights)


def as_under_torchrun(worker: int, workers: int) -> None:
    """Set what torchrun sets; the process group is there already."""
    warnings.simplefilter("default")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "tests"}
    ranks = {"RANK": worker, "LOCAL_RANK": worker, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers, "GROUP_RANK": 0}
    os.environ.update(address | {name: str(value) for name, value in ranks.items()})


def fit(
    plan: str | None,
    epochs: int = 2,
    *,
    net: Callable[[], Net] = Net,
    strategy: Any = None,
    resume: Any = None,
    callbacks: Sequence[Callback] = (),
    options: dict[str, Any] | None = None,
    **trainer: Any,
) -> Run:
    """Fit a net from one seed on every worker, under a plan or without laconic."""
    torch.manual_seed(0)
    model = net()
    callback = None if plan is None else Laconic(plan, **(options or {}))
    made = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        strategy=strategy or (DDPStrategy() if dist.is_initialized() else "auto"),
        max_epochs=epochs,
        callbacks=[*([callback] if callback else []), *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(each, pl.callbacks.Checkpoint) for each in callbacks),
        **trainer,
    )
    made.fit(model, loader(), ckpt_path=resume, weights_only=True)
    return Run(model.losses, flat(model), callback and callback.session, made)


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def by_hand(
    plan: str, epochs: int = 2, *, accumulate: int = 1, clip: float | None = None, bare: bool = False
) -> tuple[list[float], Tensor, laconic.Session]:
    """Train as `fit` does, in a loop of torch's own."""
    torch.manual_seed(0)
    net = Net()
    model: nn.Module = net if bare else DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    sampler: DistributedSampler[Any] = DistributedSampler(loader().dataset, shuffle=True, seed=0)
    session = laconic.attach(laconic.plan(plan), model, optimizer)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        batches = list(DataLoader(loader().dataset, batch_size=8, sampler=sampler))
        for index, (x, y) in enumerate(batches):
            last = (index + 1) % accumulate == 0 or index + 1 == len(batches)
            context = model.no_sync() if isinstance(model, DDP) and not last else torch.enable_grad()
            with context:
                loss = (model(x) - y).square().mean()
                losses.append(loss.item())
                (loss / accumulate).backward()
            if not last:
                continue
            if clip is not None:
                session.average_gradients()
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    session.detach()
    return losses, flat(net), session


def half(scale: float = 2.0**8) -> MixedPrecision:
    """fp16 with a GradScaler on the CPU, where Lightning itself would choose bf16."""
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))


class Counter(Callback):  # type: ignore[misc]
    """Counts what the interface sends between two batches, and what the ledger has of it.

    Files are the barrier: a packet of a worker that is ahead would be acknowledged by one that still counts.
    """

    def __init__(self, folder: Path, first: int, last: int) -> None:
        self.folder, self.first, self.last = folder, first, last
        self.sent = [0, 0]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx not in (self.first, self.last):
            return
        if batch_idx == self.first:
            self.barrier(trainer.global_rank, "before")
            time.sleep(0.3)  # acknowledgements that are still to come
        (callback,) = (each for each in trainer.callbacks if isinstance(each, Laconic))
        assert callback.session is not None
        interface = int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())
        now = interface, callback.session.ledger.wire_bytes
        self.sent = [count - before for count, before in zip(now, self.sent, strict=True)]
        self.barrier(trainer.global_rank, str(batch_idx))

    def barrier(self, worker: int, name: str) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / f"{name} {worker}").touch()
        deadline = time.monotonic() + 60
        while not (self.folder / f"{name} {1 - worker}").exists():
            assert time.monotonic() < deadline, f"the other worker does not come to {name}"
            time.sleep(0.01)


class Quiet(Callback):  # type: ignore[misc]
    """Leaves out what Lightning broadcasts in every batch: whether worker 0 got SIGTERM."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def count_local_steps(worker: str, leader: str, folder: str) -> None:
    """Print the bytes of three local steps, at the interface and in the ledger, also without Lightning's broadcast."""
    as_under_torchrun(int(worker), 2)
    dist.init_process_group("gloo", init_method=f"tcp://{leader}:29500", rank=int(worker), world_size=2)
    found = {}
    for net in (Net, Manual):
        for quiet in (False, True):
            what = f"{net.__name__} {'quiet' if quiet else 'as it is'}"
            counter = Counter(Path(folder, what), first=1, last=BATCHES - 1)
            callbacks: list[Callback] = [counter, *([Quiet()] if quiet else [])]
            strategy = DDPStrategy(find_unused_parameters=True)
            fit("Plan(schedule=Every(100))", 1, net=net, strategy=strategy, callbacks=callbacks)
            found[what] = counter.sent
    sys.stdout.write(json.dumps(found))
