"""laconic under Lightning's Trainer: the losses, the bytes, and what a resumed run does, with two workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import laconic
from laconic import checkpoint
from laconic.checkpoint.state import flatten
from tests.workers import listen, run_workers

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

from laconic.integrations.lightning import Laconic
from tests.integrations.lightning_runs import BATCHES, Manual, Net, as_under_torchrun, by_hand, fit, flat, half

pytestmark = pytest.mark.frameworks

COMPRESSED, LOCAL = "power_sgd(rank=2, min_compression=0)", "diloco(period=3)"
CLIPPED: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}


class Bare(DDPStrategy):  # type: ignore[misc]
    """Workers of a process group, and no DDP model around the module."""

    def configure_ddp(self) -> None:
        pass


def exact(worker: int) -> None:
    as_under_torchrun(worker, 2)
    every: list[dict[str, Any]] = [{}, CLIPPED, {"net": Manual}, {"precision": "bf16-mixed"}]
    for options in every:
        plain, ours = fit(None, **options), fit("ddp()", **options)
        assert plain.same(ours), options
        assert ours.session.step == ours.trainer.global_step // (2 if "net" in options else 1)
        assert not ours.session.attached


def test_ddp_trains_as_lightning_does():
    run_workers(exact, 2, timeout_s=150)


def like_a_loop(worker: int) -> None:
    as_under_torchrun(worker, 2)
    for plan in (COMPRESSED, LOCAL):
        ours = fit(plan, **CLIPPED)
        losses, weights, session = by_hand(plan, accumulate=2, clip=0.1)
        assert ours.losses == losses and torch.equal(ours.weights, weights), plan
        ledger = ours.session.ledger
        assert ledger.wire_bytes == session.ledger.wire_bytes and ledger.collectives == session.ledger.collectives


def test_accumulated_and_clipped_batches_train_as_in_a_loop():
    run_workers(like_a_loop, 2, timeout_s=150)


def unwrapped(worker: int) -> None:
    as_under_torchrun(worker, 2)
    for plan in (COMPRESSED, LOCAL):
        ours = fit(plan, strategy=Bare(), **CLIPPED)
        losses, weights, _ = by_hand(plan, accumulate=2, clip=0.1, bare=True)
        assert ours.losses == losses and torch.equal(ours.weights, weights), plan
        # Two optimizers under manual optimization do what one does, until its schedule lowers the learning rate.
        one, two = fit(plan, 1, strategy=Bare()), fit(plan, 1, strategy=Bare(), net=Manual)
        assert one.losses == two.losses


def test_a_bare_module_is_averaged_before_it_is_clipped():
    run_workers(unwrapped, 2, timeout_s=150)


def half_precision(worker: int) -> list[list[float]]:
    as_under_torchrun(worker, 2)
    scaler = partial(half, 2.0**18)  # overflows at first: these steps are skipped, and counted
    assert fit(None, plugins=[scaler()]).same(fit("ddp()", plugins=[scaler()]))
    for clip in (None, 0.5):  # a bare module's gradients are unscaled, averaged and clipped, in this order
        plain = fit(None, plugins=[half()], gradient_clip_val=clip)
        assert plain.same(fit("ddp()", strategy=Bare(), plugins=[half()], gradient_clip_val=clip)), clip
    runs = [
        fit(plan, plugins=[scaler()], options={"attach": partial(laconic.attach, clip_norm=1.0)})
        for plan in (COMPRESSED, "Plan(schedule=Every(5))")
    ]
    for run in runs:
        assert run.session.step == 2 * BATCHES
        assert run.trainer.precision_plugin.scaler.get_scale() < 2.0**18
    return [run.weights.tolist() for run in runs]


def test_fp16_with_a_grad_scaler():
    first, second = run_workers(half_precision, 2, timeout_s=150)
    assert first == second, "all workers have the same weights after the last step"


def counted(worker: int) -> dict[str, tuple[float, float]]:
    as_under_torchrun(worker, 2)
    found = {}
    shapes = {name: tuple(p.shape) for name, p in Net(norm=False).named_parameters()}
    for plan in ("ddp()", COMPRESSED, "Plan(schedule=Every(5))", LOCAL):
        session = fit(plan, epochs=6, net=partial(Net, norm=False)).session
        phases = session.ledger.totals(by="phase")
        sent = sum(total.wire_bytes for name, total in phases.items() if name in ("gradient", "weights"))
        found[plan] = (sent, laconic.sent_bytes(laconic.plan(plan), shapes) * session.step)
        assert session.step == 30
    return found


def test_the_ledger_has_the_planned_bytes():
    first, _ = run_workers(counted, 2, timeout_s=150)  # shards of few rows are uneven: the plan is that of worker 0
    for plan, (sent, planned) in first.items():
        assert sent == pytest.approx(planned), plan


def resumed(worker: int, plan: str, net: type[Net], folder: str) -> None:
    as_under_torchrun(worker, 2)
    whole = fit(plan, epochs=3, net=net)
    kept = ModelCheckpoint(folder, filename="{epoch}", save_top_k=2, monitor="step", mode="max", save_last=True)
    fit(plan, epochs=2, net=net, callbacks=[kept])
    assert sorted(path.name for path in Path(folder).iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    for epochs, name in ((1, "epoch=0.ckpt"), (2, "last.ckpt")):
        after = fit(plan, epochs=3, net=net, resume=f"{folder}/{name}")
        assert after.losses == whole.losses[epochs * BATCHES :] and torch.equal(after.weights, whole.weights)
        assert after.session.step == 3 * BATCHES
    after.trainer.save_checkpoint(f"{folder}/end.ckpt")  # after fit: the session is detached
    again = fit(plan, epochs=4, net=net, resume=f"{folder}/end.ckpt")
    assert again.losses == fit(plan, epochs=4, net=net).losses[3 * BATCHES :]


@pytest.mark.parametrize(
    ("plan", "net"), [(COMPRESSED, Net), (LOCAL, Net), ("streaming_diloco(period=4, fragments=2, delay=1)", Manual)]
)
def test_a_resumed_run_is_the_uninterrupted_one(plan, net, tmp_path):
    run_workers(resumed, 2, args=(plan, net, str(tmp_path)), timeout_s=150)
    saved = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)
    first, second = saved["laconic"]["workers"]
    assert bool(first["session"]["in_flight"]) == ("streaming" in plan)
    assert set(first) == {"session"} and bool(second["tensors"]) == laconic.plan(plan).local
    assert torch.equal(
        flat(net.load_from_checkpoint(tmp_path / "epoch=1.ckpt", weights_only=True)),
        torch.cat([saved["state_dict"][name].flatten() for name, _ in net().named_parameters()]),
    )
    if plan == COMPRESSED:  # what is equal on both workers is written once
        without = {key: value for key, value in saved.items() if key != "laconic"}
        torch.save(without, tmp_path / "without.ckpt")
        states = 2 * 4 * sum(p.numel() for p in net().parameters())
        grown = (tmp_path / "epoch=1.ckpt").stat().st_size - (tmp_path / "without.ckpt").stat().st_size
        assert grown < 2 * states + 20_000


def saving(worker: int, folder: str) -> list[str]:
    as_under_torchrun(worker, 2)
    said = listen()
    every = ModelCheckpoint(f"{folder}/every", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    fit(LOCAL, callbacks=[every])
    fit("ddp()", 1, callbacks=[ModelCheckpoint(f"{folder}/once")])
    return said


def test_checkpoints_that_send_more_than_training_are_named_once(tmp_path):
    first, second = run_workers(saving, 2, args=(str(tmp_path),), timeout_s=150)
    lines = [line for line in second if "to save checkpoints" in line]
    assert len(lines) == 1 and not any("to save checkpoints" in line for line in first)
    assert re.fullmatch(
        r"worker 1 has sent [\d,]+ bytes to save checkpoints, and [\d,]+ to train: .* Save less often: .*", lines[0]
    )


class Watch(pl.Callback):  # type: ignore[misc]
    """Calls a function with the session when an epoch starts. It comes after `Laconic` in the list."""

    def __init__(self, call: Callable[[Any, laconic.Session], object]) -> None:
        self._call = call

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        (callback,) = (each for each in trainer.callbacks if isinstance(each, Laconic))
        assert callback.session is not None
        self._call(trainer, callback.session)


def change(trainer: Any, session: laconic.Session) -> None:
    if trainer.current_epoch == 0:
        session.change(laconic.quantized_ddp(bits=4))


def other_plans(worker: int, folder: str) -> None:
    as_under_torchrun(worker, 2)
    # A plan that the session has changed to, as a guard does, goes on in a resumed run.
    whole = fit(COMPRESSED, callbacks=[Watch(change)])
    fit(COMPRESSED, 1, callbacks=[ModelCheckpoint(folder, filename="two"), Watch(change)])
    after = fit(COMPRESSED, resume=f"{folder}/two.ckpt", callbacks=[Watch(change)])
    assert after.session.plan == laconic.quantized_ddp(bits=4)
    assert after.losses == whole.losses[BATCHES:] and torch.equal(after.weights, whole.weights)
    # Another plan that the user gives takes the place of the one that was saved.
    after = fit(LOCAL, resume=f"{folder}/two.ckpt")
    assert after.session.plan == laconic.plan(LOCAL) and after.session.step == 2 * BATCHES
    # A checkpoint that was saved without laconic.
    fit(None, 1, callbacks=[ModelCheckpoint(folder, filename="plain")])
    said = listen()
    fit(COMPRESSED, resume=f"{folder}/plain.ckpt")
    assert any(re.search("plain.ckpt has no state of laconic: .* residuals start at zero", line) for line in said)


def test_a_resumed_run_with_another_plan_or_number_of_workers(tmp_path):
    run_workers(other_plans, 2, args=(str(tmp_path),), timeout_s=150)
    path = tmp_path / "two.ckpt"
    with pytest.raises(ValueError, match=r"two.ckpt'\): 2 workers saved this checkpoint, and there are 1; .*resize="):
        fit(COMPRESSED, resume=path)
    old = [worker["session"] for worker in torch.load(path, weights_only=True)["laconic"]["workers"]]
    (expected,), found = checkpoint.resize(old, 1), []
    fit(
        COMPRESSED,
        resume=path,
        options={"resize": "sum"},
        callbacks=[Watch(lambda trainer, session: found.append(session.state_dict()))],
    )
    (skeleton, tensors), (seen, held) = flatten(expected["state"]), flatten(found[0]["state"])
    assert seen == skeleton and all(torch.equal(held[name], t) for name, t in tensors.items())
    assert found[0]["step"] == BATCHES and any("residual" in name for name in tensors)
    with pytest.raises(ValueError, match=r'Laconic\(resize=True\): resize must be "sum", "mean" or None'):
        Laconic("ddp()", resize=True)  # type: ignore[arg-type]


class Failing(Net):
    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if batch_idx == 2:
            raise OSError("the disk is full")


def failing(worker: int, folder: str) -> None:
    as_under_torchrun(worker, 2)
    callback = Laconic(COMPRESSED)
    saving = ModelCheckpoint(folder, filename="failed", save_on_exception=True)
    with pytest.raises(OSError, match="disk is full"):
        fit(None, net=Failing, callbacks=[callback, saving])
    assert callback.session is not None and callback.session.step == 3 and not callback.session.attached
    with pytest.raises(RuntimeError, match="this model has a session already"):
        fit("ddp()", callbacks=[Laconic("ddp()")])


def test_an_error_detaches(tmp_path):
    run_workers(failing, 2, args=(str(tmp_path),), timeout_s=150)
    assert "laconic" not in torch.load(tmp_path / "failed.ckpt", weights_only=True)


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (FSDPStrategy(), r'Laconic under FSDPStrategy: .* Use Trainer\(strategy="ddp"\)'),
        (ModelParallelStrategy(), r"Laconic under ModelParallelStrategy: .* laconic.attach\(plan, model, optimizer\)"),
        (DDPStrategy(ddp_comm_hook=allreduce_hook), r"DDPStrategy\(ddp_comm_hook=allreduce_hook\): .* Leave out"),
    ],
)
def test_refuses_strategies_that_average_themselves(strategy, text):
    with pytest.raises(ValueError, match=text):
        Laconic("ddp()").setup(SimpleNamespace(strategy=strategy), None, "fit")
    Laconic("ddp()").setup(SimpleNamespace(strategy=strategy), None, "validate")


def test_the_blocks_of_the_page_run(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text()
    blocks = re.findall(r"^```python lightning\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 2 and len(re.findall("^```python", page, re.M)) == 2
    for number, block in enumerate(blocks):  # Lightning starts the second worker itself
        script = tmp_path / f"block{number}.py"
        script.write_text(block)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, script], cwd=tmp_path, start_new_session=True, **pipes)
        try:
            out, err = process.communicate(timeout=120)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, err[-3000:]
        assert number > 0 or len(re.findall(r"16 steps, [\d,]+ bytes sent by worker [01]$", out, re.M)) == 2
