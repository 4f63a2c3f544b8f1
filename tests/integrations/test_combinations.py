"""Options of frameworks together: precision, clipping, accumulated batches and plans, in every combination.

Under `ddp()` a framework trains as it does without laconic, bit for bit. Under plans that send gradients or deltas it
trains as a loop of torch's own does under the same plan, and under `alone()` as a loop without DDP or laconic does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import laconic
from tests.integrations.torchrun_env import run_as_torchrun
from tests.workers import run_workers

pytest.importorskip("lightning")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricPrecision
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.strategies import DDPStrategy

from laconic.integrations.lightning import Laconic
from tests.integrations.lightning_runs import as_under_torchrun, half

pytestmark = pytest.mark.frameworks

Precision = Literal["32", "bf16", "fp16"]
Clip = Literal["none", "norm", "value"]
PRECISIONS: tuple[Precision, ...] = ("32", "bf16", "fp16")
CLIPS: tuple[Clip, ...] = ("none", "norm", "value")
PLANS = ("power_sgd(rank=2, min_compression=0)", "diloco(period=3)", "alone()")
WORKERS, BATCHES, ROWS, LR = 2, 8, 4, 0.05
LIMITS = {"norm": 0.1, "value": 0.02}
SCALE = 2.0**18
"""Overflows at first, in fp16: these steps are skipped, and counted."""


@dataclass(frozen=True)
class Cell:
    """Options of one training."""

    precision: Precision
    clip: Clip
    accumulate: int


@dataclass
class Trained:
    """What one worker saw of a training."""

    losses: list[float]
    weights: Tensor
    steps: int | None

    def check(self, expected: Trained, what: object) -> None:
        assert self.losses == expected.losses, what
        assert torch.equal(self.weights, expected.weights), what


class Regression(nn.Module):
    """A small regression, as the Trainer of transformers wants one: the loss is part of what `forward` returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
        self.losses: list[float] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = nn.functional.mse_loss(self.layers(x).float(), labels)
        self.losses.append(loss.item())
        return {"loss": loss}

    def trained(self, session: laconic.Session | None) -> Trained:
        weights = nn.utils.parameters_to_vector(self.parameters()).detach().clone()
        return Trained(self.losses, weights, None if session is None else session.step)


class Outer(nn.Module):
    def __init__(self, net: Regression) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.net(x, labels)


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(WORKERS * BATCHES * ROWS, 16, generator=generator)
    labels = (48 * x.sum(1, keepdim=True).sin()).round() / 16  # the same in bf16 and fp16: Fabric converts them
    return [{"x": row, "labels": label} for row, label in zip(x, labels, strict=True)]


def pairs() -> Dataset[Any]:
    return TensorDataset(*(torch.stack([row[name] for row in rows()]) for name in ("x", "labels")))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)


def scaler_for(cell: Cell) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=cell.precision == "fp16")


def by_hand(plan: str | None, cell: Cell, own: Sequence[int], *, inside: bool = False, end: bool = False) -> Trained:
    """Train on these rows under a plan, or alone without a plan, in a loop of torch's own.

    `inside` is whether the model is inside another: codecs draw random numbers by the names of parameters.
    """
    net = Regression()
    bare = Outer(net) if inside else net
    model: nn.Module = bare if plan is None else DDP(bare)
    optimizer, scaler = adamw(model), scaler_for(cell)
    session = None if plan is None else laconic.attach(laconic.plan(plan), model, optimizer, scaler=scaler)
    data = rows()
    half = torch.bfloat16 if cell.precision == "bf16" else torch.float16
    for index in range(BATCHES):
        batch = [data[row] for row in own[index * ROWS : (index + 1) * ROWS]]
        x, labels = (torch.stack([row[name] for row in batch]) for name in ("x", "labels"))
        last = (index + 1) % cell.accumulate == 0
        with contextlib.nullcontext() if last or not isinstance(model, DDP) else model.no_sync():
            with torch.autocast("cpu", half, enabled=cell.precision != "32"):
                loss = model(x, labels)["loss"]
            scaler.scale(loss / cell.accumulate).backward()
        if not last:
            continue
        scaler.unscale_(optimizer)
        if cell.clip == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), LIMITS["norm"])
        elif cell.clip == "value":
            nn.utils.clip_grad_value_(model.parameters(), LIMITS["value"])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if session is not None:
        if end:
            session.average_weights()
        session.detach()
    return net.trained(session)


Train = Callable[[str | None, Cell], Trained]


def compare(train: Train, cells: Sequence[Cell], own: Sequence[int], **hand: bool) -> dict[str, Tensor]:
    """Check every cell under every plan on this worker; return the weights, for comparison with the others'."""
    found = {}
    for cell in cells:
        train("ddp()", cell).check(train(None, cell), cell)
        for plan in PLANS:
            ours = train(plan, cell)
            ours.check(by_hand(None if plan == "alone()" else plan, cell, own, **hand), (plan, cell))
            assert ours.steps == BATCHES // cell.accumulate, (plan, cell)
            found[f"{plan} {cell}"] = ours.weights
    return found


def check_workers(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Workers that average gradients have equal weights, and those that train alone have not."""
    for name in first:
        if not name.startswith("diloco"):  # its last round is not over
            assert torch.equal(first[name], second[name]) != name.startswith("alone"), name


def cells(precisions: Sequence[Precision] = PRECISIONS, clips: Sequence[Clip] = CLIPS) -> list[Cell]:
    return [Cell(*each) for each in product(precisions, clips, (1, 2))]


# Lightning's Trainer


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = Regression()

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        return self.net(*batch)["loss"]

    def configure_optimizers(self) -> Any:
        return adamw(self)


def under_lightning(plan: str | None, cell: Cell) -> Trained:
    callback = None if plan is None else Laconic(plan)
    options: dict[str, Any] = {"precision": "bf16-mixed"} if cell.precision == "bf16" else {}
    if cell.clip != "none":
        options |= {"gradient_clip_val": LIMITS[cell.clip], "gradient_clip_algorithm": cell.clip}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORKERS,
        strategy=DDPStrategy(),
        max_epochs=1,
        callbacks=[] if callback is None else [callback],
        plugins=[half(SCALE)] if cell.precision == "fp16" else [],
        accumulate_grad_batches=cell.accumulate,
        use_distributed_sampler=False,  # Lightning's own shuffles
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    module = Module()
    data = pairs()
    trainer.fit(module, DataLoader(data, batch_size=ROWS, sampler=DistributedSampler(data, shuffle=False)))
    return module.net.trained(callback and callback.session)


def lightning(worker: int) -> dict[str, Tensor]:
    as_under_torchrun(worker, WORKERS)
    return compare(under_lightning, cells(), range(worker, len(rows()), WORKERS), inside=True)


def test_lightning():
    check_workers(*run_workers(lightning, WORKERS, timeout_s=150))


# Fabric


def under_fabric(plan: str | None, cell: Cell) -> Trained:
    scaler = scaler_for(cell) if cell.precision == "fp16" else None
    precision: dict[str, Any] = {"precision": "bf16-mixed"} if cell.precision == "bf16" else {}
    if scaler is not None:
        precision = {"plugins": [FabricPrecision("16-mixed", "cpu", scaler=scaler)]}
    fabric = Fabric(accelerator="cpu", devices=WORKERS, strategy=FabricDDP(), **precision)
    fabric.launch()
    net = Regression()
    model, optimizer = fabric.setup(net, adamw(net))
    session = None if plan is None else laconic.attach(plan, model, optimizer, scaler=scaler)
    for index, batch in enumerate(fabric.setup_dataloaders(DataLoader(pairs(), batch_size=ROWS))):
        last = (index + 1) % cell.accumulate == 0
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(model(*batch)["loss"] / cell.accumulate)
        if not last:
            continue
        if cell.clip == "norm":
            fabric.clip_gradients(model, optimizer, max_norm=LIMITS["norm"], error_if_nonfinite=False)
        elif cell.clip == "value":
            fabric.clip_gradients(model, optimizer, clip_val=LIMITS["value"])
        optimizer.step()
        optimizer.zero_grad()
    if session is not None:
        session.detach()
    return net.trained(session)


def fabric(worker: int) -> dict[str, Tensor]:
    as_under_torchrun(worker, WORKERS)
    return compare(under_fabric, cells(), range(worker, len(rows()), WORKERS))


def test_fabric():
    check_workers(*run_workers(fabric, WORKERS, timeout_s=150))


# Accelerate, which gives workers whole batches in turn. It refuses fp16 on a CPU.


def in_turn(worker: int) -> list[int]:
    return [row for row in range(len(rows())) if row // ROWS % WORKERS == worker]


def under_accelerate(plan: str | None, cell: Cell) -> Trained:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # it keeps the precision of the last one
    mixed = "bf16" if cell.precision == "bf16" else "no"
    accelerator = Accelerator(cpu=True, mixed_precision=mixed, gradient_accumulation_steps=cell.accumulate)
    if cell.precision == "fp16":
        accelerator.scaler, accelerator.native_amp = scaler_for(cell), True
        accelerator.state._mixed_precision = "fp16"
    net = Regression()
    model, optimizer, loader = accelerator.prepare(net, adamw(net), DataLoader(pairs(), batch_size=ROWS))
    session = None if plan is None else laconic.attach(plan, model, optimizer)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(*batch)["loss"])
            if accelerator.sync_gradients and cell.clip == "norm":
                accelerator.clip_grad_norm_(model.parameters(), LIMITS["norm"])
            elif accelerator.sync_gradients and cell.clip == "value":
                accelerator.clip_grad_value_(model.parameters(), LIMITS["value"])
            optimizer.step()
            optimizer.zero_grad()
    if session is not None:
        session.detach()
    return net.trained(session)


def accelerate(worker: int) -> dict[str, Tensor]:
    from accelerate import Accelerator

    Accelerator(cpu=True)  # makes the process group
    return compare(under_accelerate, cells(), in_turn(worker))


def test_accelerate():
    check_workers(*run_as_torchrun(accelerate))


# The Trainer of transformers: it clips by norm alone, and has no fp16 on a CPU


def under_transformers(plan: str | None, cell: Cell) -> Trained:
    from transformers import Trainer, TrainingArguments

    from laconic.integrations.transformers import LaconicCallback

    given = TrainingArguments(
        os.environ["OUT"],
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        num_train_epochs=1,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=cell.accumulate,
        max_grad_norm=LIMITS["norm"] if cell.clip == "norm" else 0.0,
        bf16=cell.precision == "bf16",
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        train_sampling_strategy="sequential",
        logging_strategy="no",
        save_strategy="no",
    )
    net = Regression()
    trainer = Trainer(net, given, train_dataset=rows())
    callback = None if plan is None else LaconicCallback(plan, trainer)
    if callback is not None:
        trainer.add_callback(callback)
    trainer.train()
    return net.trained(callback and callback.session)


def transformers(worker: int, folder: str) -> dict[str, Tensor]:
    from accelerate import Accelerator

    os.environ["OUT"] = folder
    Accelerator(cpu=True)
    return compare(under_transformers, cells(("32", "bf16"), ("none", "norm")), in_turn(worker), end=True)


def test_transformers(tmp_path):
    check_workers(*run_as_torchrun(transformers, (str(tmp_path),)))
