"""peft's adapters on a frozen base, dense and quantised: what is sent, what workers end with, and resuming."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic import checkpoint
from tests.integrations.peft_models import BASES, adapted, batch, trained
from tests.workers import run_workers

pytestmark = pytest.mark.frameworks
pytest.importorskip("peft")

STEPS = 6
PLANS = (
    "ddp()",
    "power_sgd(rank=2, min_compression=0)",
    "quantized_ddp(bits=4)",
    "post_local_sgd(period=2)",
    "diloco(period=3)",
)
CONTROL_BYTES = 4000
"""More than handshake, headers and digests of a run need; a hundredth of the base."""


def attach(plan: str, model: Any, ddp: bool = True, **options: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
    wrapped = DDP(model, init_sync=False) if ddp else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return wrapped, optimizer, laconic.attach(plan, wrapped, optimizer, **options)


def train(worker: int, wrapped: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = wrapped(**batch(step, worker)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trained(model).items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def sent(session: laconic.Session) -> dict[str, int]:
    return {phase: total.wire_bytes for phase, total in session.ledger.totals(by="phase").items()}


def base_bytes(model: Any) -> int:
    return sum(p.nbytes for p in model.parameters() if not p.requires_grad)


def _every_plan(worker: int, dora: bool, ddp: bool) -> dict[str, Any]:
    results = {}
    for plan in PLANS:
        model = adapted(dora=dora)
        before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
        wrapped, optimizer, session = attach(plan, model, ddp)
        losses = train(worker, wrapped, optimizer, range(STEPS))
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if not p.requires_grad)
        results[plan] = losses, weights_of(model), sent(session)
        session.detach()
    return results


@pytest.mark.parametrize(("workers", "dora", "ddp"), [(2, False, True), (2, True, False), (4, True, True)])
def test_only_adapters_are_sent(workers, dora, ddp):
    results = run_workers(_every_plan, workers, (dora, ddp), timeout_s=150)
    model = adapted(dora=dora)
    tensors, base = trained(model), base_bytes(model)
    assert any("lora_magnitude_vector" in name for name in tensors) == dora
    assert base > 20 * sum(p.nbytes for p in tensors.values())
    for plan in PLANS:
        made = laconic.plan(plan)
        planned = STEPS * laconic.sent_bytes(made, tensors, workers)
        rounds = {"post_local_sgd(period=2)": 3, "diloco(period=3)": 2}.get(plan, 0)
        averaged = rounds * sum(b.nbytes for b in model.buffers()) * 2 * (workers - 1) / workers  # rotary frequencies
        for worker, (losses, weights, phases) in enumerate(each[plan] for each in results):
            assert losses[3] < losses[0]
            assert same(weights, results[0][plan][1]), f"{plan}: all end with the same adapters"
            payload = phases["weights" if made.local else "gradient"]
            if worker == 0:
                assert payload == planned + averaged, plan
            else:  # rows in few bits are not divided evenly among workers
                assert payload == pytest.approx(planned + averaged, rel=0.15), (plan, worker)
            assert sum(phases.values()) - payload < CONTROL_BYTES < base / 20, plan


def _beside_torch(worker: int) -> bool:
    plain = adapted()
    wrapped = DDP(plain)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01)
    losses = train(worker, wrapped, optimizer, range(STEPS))
    model = adapted()
    ours, its, _ = attach("ddp()", model)
    return train(worker, ours, its, range(STEPS)) == losses and same(weights_of(model), weights_of(plain))


def test_ddp_trains_as_torch_does():
    assert run_workers(_beside_torch, 2, timeout_s=90) == [True, True]


def _bases_differ(worker: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for sync_initial in (True, False):
        model = adapted(seed=worker)  # adapters that no seed made equal
        name, odd = next((n, p) for n, p in model.named_parameters() if "up_proj" in n)
        with torch.no_grad():
            odd += worker
        try:
            session = attach("ddp()", model, sync_initial=sync_initial)[2]
        except laconic.DisagreementError as error:
            found["refused"] = str(error)
        else:
            found |= {"sent": sent(session), "odd": odd.nbytes, "weights": weights_of(model), "base": odd.detach()}
            assert name
    return found


def test_of_a_base_that_differs_only_what_differs_is_sent():
    first, second = run_workers(_bases_differ, 2, timeout_s=90)
    for found in (first, second):
        assert "up_proj" in found["refused"] or "lora_A" in found["refused"]
        assert "sync_initial=True" in found["refused"]
    assert torch.equal(first["base"], second["base"]) and same(first["weights"], second["weights"])
    adapters = sum(t.nbytes for name, t in first["weights"].items() if "lora_A" in name)  # lora_B is zero everywhere
    assert 0 <= first["sent"]["control"] - first["odd"] - adapters < CONTROL_BYTES


def _save_and_resume(worker: int, plan: str, folder: str, base: str) -> tuple[bool, list[str]]:
    """Train six steps; or three, save the adapters alone, and go on in a new model. Return whether both are equal."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    options: dict[str, Any] = {"seed": 0, "base": base, "dora": base == "dense"}
    whole = adapted(**options)
    wrapped, optimizer, session = attach(plan, whole)
    losses = train(worker, wrapped, optimizer, range(3))
    adapters = get_peft_model_state_dict(whole)
    state = {"adapters": adapters, "optimizer": optimizer.state_dict(), "session": session.state_dict()}
    checkpoint.save(folder, state, step=session.step)
    losses += train(worker, wrapped, optimizer, range(3, STEPS))
    session.detach()

    model = adapted(**(options | {"seed": 1}))
    wrapped, optimizer, session = attach(plan, model)
    saved = checkpoint.load(folder).state
    set_peft_model_state_dict(model, saved["adapters"])
    optimizer.load_state_dict(saved["optimizer"])
    session.load_state_dict(saved["session"])
    again = train(worker, wrapped, optimizer, range(3, STEPS))
    session.detach()
    return again == losses[3:] and same(weights_of(model), weights_of(whole)), sorted(adapters)


@pytest.mark.parametrize("base", BASES)
def test_resuming_from_adapters_alone_is_exact(tmp_path, base):
    for plan in (PLANS[1], PLANS[4]):
        for equal, names in run_workers(_save_and_resume, 2, (plan, str(tmp_path / plan), base), timeout_s=120):
            assert equal, plan
            assert names and all("lora_" in name for name in names)


def _quantised(worker: int, base: str) -> tuple[dict[str, int], int, list[float], str]:
    model = adapted(base)
    wrapped, optimizer, session = attach("ddp()", model, verify_every=2, sync_initial=False)
    losses = train(worker, wrapped, optimizer, range(STEPS))
    phases = sent(session)
    session.detach()
    quantised = next(p for name, p in model.named_parameters() if "q_proj.base_layer" in name)
    part = getattr(quantised, "qdata", quantised.data)
    if worker:
        part.view(-1)[0] += 1
    try:
        attach("ddp()", model, sync_initial=False)
    except laconic.DisagreementError as error:
        return phases, base_bytes(model), losses, str(error)
    raise AssertionError("the packed weights differ")


@pytest.mark.parametrize("base", BASES[1:])
def test_a_quantised_base_is_compared_and_not_sent(base):
    planned = STEPS * laconic.sent_bytes(laconic.ddp(), trained(adapted(base)), 2)
    for phases, whole, losses, said in run_workers(_quantised, 2, (base,), timeout_s=90):
        assert losses[3] < losses[0]
        assert 0 <= phases["gradient"] - planned <= 2000
        assert sum(phases.values()) < planned + CONTROL_BYTES + 2000 < planned + whole
        assert "q_proj.base_layer.weight" in said and "differ" in said


def _hsdp(worker: int, plan: str) -> tuple[bool, list[float], dict[str, int]]:
    """Shard base and adapters inside a machine of two, and replicate between two machines."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = adapted()
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    session = laconic.attach(plan, model, optimizer)
    losses = train(worker, model, optimizer, range(STEPS))
    phases = sent(session)
    whole: dict[str, Any] = {name: p.full_tensor() for name, p in dict[str, Any](trained(model)).items()}
    gathered = session.gather([int(t.sum(dtype=torch.float64).view(torch.int64)) for t in whole.values()])
    session.detach()
    return all(row == gathered[0] for row in gathered), losses, phases


def test_hsdp_sends_adapters_alone_between_machines():
    adapters = sum(p.nbytes for p in trained(adapted()).values())
    for plan, times in (("ddp()", STEPS), ("post_local_sgd(period=3)", STEPS // 3)):
        for equal, losses, phases in run_workers(_hsdp, 4, (plan,), timeout_s=150):
            assert equal and losses[3] < losses[0]
            payload = phases["weights" if laconic.plan(plan).local else "gradient"]
            assert payload == pytest.approx(times * adapters / 2, rel=0.05)  # of half the shards; buffers come on top
            assert sum(phases.values()) - payload < CONTROL_BYTES
