"""The Trainer of transformers with `LaconicCallback`: losses, bytes, checkpoints, and what it refuses."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.integrations.torchrun_env import run_as_torchrun, run_page

pytestmark = pytest.mark.frameworks
pytest.importorskip("transformers")

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
WORKERS, STEPS = 2, 6
PLANS = (
    "ddp()",
    "power_sgd(rank=1, min_compression=0)",
    "post_local_sgd(period=2)",
    "diloco(period=4)",
    "streaming_diloco(period=4, fragments=2, delay=1)",
)


def gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16, **ids)
    )  # with dropout


def text() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    rows = torch.randint(0, 32, (64, 8))
    return [{"input_ids": row, "labels": row} for row in rows]


class Regression(nn.Module):
    """A model without **kwargs: the Trainer divides its loss by the accumulated batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


def numbers() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    rows = torch.randn(64, 8)
    return [{"x": row, "labels": row.sum().sin()[None]} for row in rows]


def make_trainer(folder: str, model: nn.Module, data: Any, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    given = {
        "use_cpu": True,
        "ddp_backend": "gloo",
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 0.01,
    }
    return Trainer(model, TrainingArguments(folder, **{**given, **options}), train_dataset=data, eval_dataset=data)


def add(trainer: Any, plan: str | None, **options: Any) -> Any:
    from laconic.integrations.transformers import LaconicCallback

    callback = LaconicCallback(plan, trainer, **options)
    trainer.add_callback(callback)
    return callback


def losses_of(trainer: Any) -> list[float]:
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def weights_of(trainer: Any) -> list[Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def sent_by(session: laconic.Session) -> dict[str, int]:
    return {phase: total.wire_bytes for phase, total in session.ledger.totals(by="phase").items()}


def _train(worker: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for plan in (None, *PLANS):
        trainer = make_trainer(folder, gpt(), text())
        callback = None if plan is None else add(trainer, plan)
        trainer.train()
        sent = {}
        if callback is not None:
            assert callback.session.step == STEPS and not callback.session.attached
            sent = sent_by(callback.session)
        results[str(plan)] = (losses_of(trainer), weights_of(trainer), sent)
    os.environ["LACONIC_PLAN"] = "power_sgd(rank=1, min_compression=0)"
    trainer = make_trainer(folder, gpt(), text())
    add(trainer, None)
    trainer.train()
    results["LACONIC_PLAN"] = (losses_of(trainer), weights_of(trainer), {})
    return results


def test_plans_train_and_send_what_is_planned(tmp_path):
    first, second = run_as_torchrun(_train, (str(tmp_path),))
    shapes = dict(gpt().named_parameters())
    whole = 4 * sum(p.numel() for p in shapes.values())
    for name in first:
        assert all(map(torch.equal, first[name][1], second[name][1])), f"{name}: the workers end with one model"
    for losses, weights, _ in (first["ddp()"], second["ddp()"]):
        assert losses == first["None"][0]
        assert all(map(torch.equal, weights, first["None"][1]))
    assert first["power_sgd(rank=1, min_compression=0)"][0] == first["LACONIC_PLAN"][0] != first["ddp()"][0]
    for plan in PLANS[:2]:
        assert first[plan][2]["gradient"] == STEPS * laconic.sent_bytes(laconic.plan(plan), shapes, WORKERS)
    assert first["post_local_sgd(period=2)"][2]["weights"] == 3 * whole
    once = 4 * laconic.sent_bytes(laconic.plan("diloco(period=4)"), shapes, WORKERS)
    assert first["diloco(period=4)"][2]["weights"] == once + whole, "after step 4, and the average at the end"
    assert "gradient" not in first["diloco(period=4)"][2]


def _accumulate(worker: int, folder: str) -> dict[str, Any]:
    results = {}
    for plan in PLANS:
        options = {"optim": "sgd", "lr_scheduler_type": "linear", "train_sampling_strategy": "sequential"}
        trainer = make_trainer(
            folder, Regression(), numbers(), gradient_accumulation_steps=2, max_grad_norm=0.05, **options
        )
        callback = add(trainer, plan)
        trainer.train()
        hand, session = _by_hand(plan, worker)
        equal = all(map(torch.equal, weights_of(trainer), hand))
        results[plan] = equal, sent_by(callback.session) == sent_by(session), callback.session.step
    return results


def _by_hand(plan: str, worker: int) -> tuple[list[Tensor], laconic.Session]:
    model = DDP(Regression(), find_unused_parameters=True)  # as the Trainer makes it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (STEPS - step) / STEPS))
    session = laconic.attach(laconic.plan(plan), model, optimizer)
    rows = numbers()
    batches = [rows[4 * i : 4 * i + 4] for i in range(len(rows) // 4)]
    own = (batches[worker::WORKERS] * 2)[: 2 * STEPS]
    for index, batch in enumerate(own):
        x, y = torch.stack([each["x"] for each in batch]), torch.stack([each["labels"] for each in batch])
        last = index % 2 == 1
        with contextlib.nullcontext() if last else model.no_sync():
            (model(x, y)["loss"] / 2).backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    session.average_weights()
    session.detach()
    return [p.detach().clone() for p in model.parameters()], session


def test_accumulation_and_clipping_are_those_of_a_loop_by_hand(tmp_path):
    for results in run_as_torchrun(_accumulate, (str(tmp_path),)):
        assert results == dict.fromkeys(PLANS, (True, True, STEPS))


class StopsAt(laconic.StepObserver):
    """Ends the training when it has got so many reports."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.seen: list[tuple[int, float, Any]] = []

    def report(self, session: laconic.Session, loss: Any, tokens: int, validation: Any) -> bool:
        self.seen.append((session.step, float(loss), validation))
        return len(self.seen) >= self.count


def _report_and_train_again(worker: int, folder: str) -> dict[str, Any]:
    observer = StopsAt(4)

    def attach(plan: Any, model: Any, optimizer: Any) -> laconic.Session:
        session = laconic.attach(plan, model, optimizer)
        session.observe(observer)
        return session

    trainer = make_trainer(folder, gpt(), text(), eval_strategy="steps", eval_steps=2, max_steps=50)
    callback = add(trainer, "post_local_sgd(period=5)", attach=attach)
    trainer.train()
    steps, logs = trainer.state.global_step, trainer.state.log_history
    first = callback.session
    observer.count = 10**6
    trainer.args.max_steps = 2
    trainer.train()
    assert callback.session is not first and callback.session.step == 2
    trainer.remove_callback(callback)
    trainer.train()
    assert callback.session.step == 2
    return {"steps": steps, "logs": logs, "seen": observer.seen[:4]}


def test_losses_are_reported_and_an_observer_stops_the_training(tmp_path):
    for result in run_as_torchrun(_report_and_train_again, (str(tmp_path),)):
        losses = [each["loss"] for each in result["logs"] if "loss" in each]
        (validation,) = [each["eval_loss"] for each in result["logs"] if "eval_loss" in each]
        assert result["steps"] == 3
        assert result["seen"] == [
            (1, losses[0], None),
            (2, losses[1], None),
            (2, losses[1], validation),
            (3, losses[2], None),
        ]


def test_what_shards_in_other_ways_is_refused():
    from laconic.integrations.transformers import LaconicCallback

    def fake(deepspeed: bool, fsdp: bool) -> Any:  # neither starts without a GPU
        plugin = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1))
        state = SimpleNamespace(state=plugin)
        return SimpleNamespace(is_deepspeed_enabled=deepspeed, is_fsdp_enabled=fsdp, accelerator=state)

    with pytest.raises(ValueError, match=r"the Trainer uses DeepSpeed.* Leave out TrainingArguments\(deepspeed="):
        LaconicCallback("ddp()", fake(True, False))
    with pytest.raises(ValueError, match=r"the Trainer uses FSDP1.* fsdp_config=\{\"version\": 2\}"):
        LaconicCallback("ddp()", fake(False, True))


def test_the_page_runs(tmp_path):
    results = run_page(PAGE, "transformers", tmp_path)
    assert [each["step"] for each in results] == [16, 16]
    assert sorted(each.name for each in tmp_path.glob("out/*")) == ["checkpoint-16", "checkpoint-8"]
    assert all(0 < each["sent"] < 30_000 for each in results), "the model has 116 kB"
