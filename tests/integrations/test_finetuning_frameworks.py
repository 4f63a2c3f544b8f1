"""peft's adapters under Accelerate and the Trainer, the page, and what the network interface counts."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.integrations.peft_models import adapted, batch, trained
from tests.integrations.torchrun_env import run_as_torchrun, run_page
from tests.namespaces import needs_root, run_on_hosts

pytestmark = pytest.mark.frameworks
pytest.importorskip("peft")  # as these modules do

from tests.integrations.test_finetuning import (  # noqa: E402
    CONTROL_BYTES,
    STEPS,
    base_bytes,
    same,
    sent,
    train,
    weights_of,
)
from tests.integrations.test_transformers import add, losses_of, make_trainer, text  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "finetuning.md"
PLANS = ("ddp()", "quantized_ddp(bits=4)", "diloco(period=2)")


def ddp_options() -> Any:
    """Return Accelerate's options of DDP with one that it does not know."""
    from accelerate import DistributedDataParallelKwargs

    @dataclass
    class Options(DistributedDataParallelKwargs):  # type: ignore[misc]
        init_sync: bool = True

    return Options(init_sync=False)


def check(whole: Any, resumed: Any, tensors: dict[str, Tensor], since: int) -> None:
    """Check that resuming was exact, that workers ended with one model, and that worker 0 sent what is planned."""
    for plan in PLANS:
        made = laconic.plan(plan)
        for one, other in zip(whole, resumed, strict=True):
            (losses, weights, phases), (again, others, _) = one[plan], other[plan]
            assert losses[since:] == again and same(weights, others), f"{plan}: resumed bit for bit"
            assert same(weights, whole[0][plan][1]), plan
            assert sum(phases.values()) - payload_of(made, phases) < CONTROL_BYTES
        more = payload_of(made, whole[0][plan][2]) - STEPS * laconic.sent_bytes(made, tensors, 2)
        assert 0 <= more < (CONTROL_BYTES if made.local else 1), "rounds of weights average the buffers, too"


def payload_of(plan: laconic.Plan, phases: dict[str, int]) -> int:
    return phases["weights" if plan.local else "gradient"]


def _with_accelerate(worker: int, folder: str, resume: bool) -> dict[str, Any]:
    from accelerate import Accelerator

    from laconic.integrations.accelerate import checkpoint

    results = {}
    for index, plan in enumerate(PLANS):
        accelerator = Accelerator(cpu=True)
        accelerator.ddp_handler = ddp_options()
        model = adapted(dora=True, seed=7 if resume else 0)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        wrapped, optimizer = accelerator.prepare(model, optimizer)
        session = laconic.attach(plan, wrapped, optimizer, sync_initial=False)
        checkpoint(accelerator, session)
        if resume:
            accelerator.load_state(f"{folder}/{index}")
        losses = []
        for step in range(session.step, STEPS):
            loss = wrapped(**batch(step, worker)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if session.step == 3 and not resume:
                accelerator.save_state(f"{folder}/{index}")
        results[plan] = losses, weights_of(model), sent(session)
        session.detach()
    return results


def test_accelerate(tmp_path):
    whole = run_as_torchrun(_with_accelerate, (str(tmp_path), False))
    resumed = run_as_torchrun(_with_accelerate, (str(tmp_path), True))
    check(whole, resumed, trained(adapted(dora=True)), since=3)


def _with_trainer(worker: int, folder: str, resume: bool) -> dict[str, Any]:
    results = {}
    for index, plan in enumerate(PLANS):
        place = Path(folder) / str(index)
        options = {"save_strategy": "steps", "save_steps": 2, "average_tokens_across_devices": False}
        trainer = make_trainer(str(place), adapted(seed=7 if resume else 0), text(), **options)
        trainer.accelerator.ddp_handler = ddp_options()
        callback = add(trainer, plan)
        trainer.train(resume_from_checkpoint=str(place / "checkpoint-2") if resume else None)
        assert callback.session.step == STEPS
        files = {each.name for each in (place / "checkpoint-2").iterdir()}
        assert "adapter_model.safetensors" in files and "model.safetensors" not in files
        results[plan] = losses_of(trainer), weights_of(trainer.model), sent(callback.session)
    return results


def test_the_trainer(tmp_path):
    whole = run_as_torchrun(_with_trainer, (str(tmp_path), False))
    resumed = run_as_torchrun(_with_trainer, (str(tmp_path), True))
    check(whole, resumed, trained(adapted()), since=0)  # the log of the first steps is in the checkpoint, too


def count_on_interface(index: int, workers: int, leader: str) -> None:
    """Print what the interface counts of a start and of steps, with and without DDP's broadcast of the base."""
    dist.init_process_group("gloo", init_method=f"tcp://{leader}:29500", rank=index, world_size=workers)
    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
    found: dict[str, Any] = {}
    for init_sync in (True, False):
        model = adapted(wide=True)
        dist.barrier()
        before = int(counter.read_text())
        wrapped = DDP(model, init_sync=init_sync)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        session = laconic.attach("ddp()", wrapped, optimizer, sync_initial=False)
        dist.barrier()
        started = int(counter.read_text())
        train(index, wrapped, optimizer, range(STEPS))
        dist.barrier()
        trained_ = int(counter.read_text())
        found[str(init_sync)] = started - before, trained_ - started, session.ledger.wire_bytes
        session.detach()
    found["base"] = base_bytes(model)
    found["adapters"] = sum(p.nbytes for p in trained(model).values())
    sys.stdout.write(json.dumps(found))


@needs_root[0]
@needs_root[1]
@pytest.mark.timeout(420)  # each host imports transformers and peft by itself
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_the_interface_counts_adapters_and_no_base(workers):
    code = "import sys; from tests.integrations.test_finetuning_frameworks import count_on_interface as c; "
    code += "c(*map(int, sys.argv[1:3]), sys.argv[3])"
    for rank, out in enumerate(run_on_hosts(workers, code, "{rank}", "{workers}", "{leader}", timeout_s=360)):
        found = json.loads(out)
        start, steps, ledger = found["False"]
        planned = STEPS * 2 * (workers - 1) / workers * found["adapters"]
        assert steps == pytest.approx(planned, rel=0.06), (rank, found)
        assert ledger == pytest.approx(steps, rel=0.05)
        assert start < found["base"] / 50
        if rank == 0:
            assert found["True"][0] > found["base"], "DDP by itself sends the base from worker 0"


def test_the_page_runs(tmp_path):
    assert [each["step"] for each in run_page(PAGE, "finetuning", tmp_path)] == [8, 8]
    results = run_page(PAGE, "finetuning", tmp_path)  # loads what the first has saved
    assert [each["step"] for each in results] == [16, 16]
    adapters = 2 * 4 * (8 * 64 + 8 * 192 + 192)
    assert all(8 * adapters <= each["sent"] < 8 * adapters + 4000 for each in results)
