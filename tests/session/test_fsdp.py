"""Models sharded by FSDP2 train as they should: as native HSDP does, as whole ones do, and under every kind of plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from tests.session.models import weights
from tests.session.sharding import assert_replicas_equal, attached, batch, gradients, net, shards, steps, two_by_two
from tests.workers import run_workers

WAYS = ("1-D", "2-D")


def _trajectories(worker: int) -> dict[str, list[float]]:
    mesh = two_by_two()
    seen = {}
    for way in ("native", *WAYS):
        model, optimizer, session = attached("ddp()", way, mesh)
        seen[way] = steps(model, optimizer, worker, 12)
        if session is not None:
            messages = session.ledger.totals(by="phase")["gradient"].collectives
            assert messages == 12 * 3, "one message for each parameter group and step"
            session.detach()
    return seen


def test_exact_averaging_trains_as_native_hsdp_does():
    for seen in run_workers(_trajectories, 4):
        for way in WAYS:
            assert seen[way] == pytest.approx(seen["native"], rel=0, abs=1e-5)


def _once(model: nn.Module, worker: int, step: int) -> None:
    x, y = batch(worker, step, next(model.parameters()).dtype)
    out = model(x)
    F.mse_loss(out, y.to(out.dtype)).backward()


def _accumulate(model: Any, worker: int, step: int) -> None:
    for part in (3 * step, 3 * step + 1, 3 * step + 2):
        _once(model, worker, part)


def _keep_back(model: Any, worker: int, step: int) -> None:
    for part in (0, 1, 2):
        model.set_requires_all_reduce(part == 2)
        _once(model, worker, 3 * step + part)


def _hold(model: Any, worker: int, step: int) -> None:
    for part in (0, 1, 2):
        model.set_requires_gradient_sync(part == 2)
        _once(model, worker, 3 * step + part)


def _divide(model: Any, worker: int, step: int) -> None:
    for module in (model, model[1], model[2]):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(2.0)
    _once(model, worker, step)


def _settings() -> dict[str, tuple[dict[str, Any], Callable[[Any, int, int], None]]]:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    half = torch.bfloat16
    return {
        "kept whole after forward": ({"reshard_after_forward": False}, _once),
        "bf16, reduced in fp32": ({"mp_policy": MixedPrecisionPolicy(half, reduce_dtype=torch.float32)}, _once),
        "reduced in bf16": ({"mp_policy": MixedPrecisionPolicy(half, reduce_dtype=half)}, _once),
        "bf16 throughout": ({"dtype": half}, _once),
        "fp64": ({"dtype": torch.float64}, _once),
        "offloaded": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, _once),
        "accumulated": ({}, _accumulate),
        "accumulated, all-reduced once": ({}, _keep_back),
        "accumulated, reduced once": ({}, _hold),
        "divided by 2, not by 4": ({}, _divide),
    }


def _gradients(worker: int, label: str) -> dict[str, list[Tensor]]:
    """Gradients of two steps, without a step of the optimizer between, zeroed and then kept."""
    mesh = two_by_two()
    seen: dict[str, list[Tensor]] = {}
    for way in ("native", "1-D", "2-D"):
        if way == "1-D" and label.startswith("divided"):
            continue  # a factor for the shards alone: replicas are averaged
        options, backward = _settings()[label]
        model, optimizer, _ = attached("ddp()", way, mesh, **options)
        seen[way] = []
        for step, keep in enumerate((False, True, False)):
            optimizer.zero_grad(set_to_none=not keep)
            backward(model, worker, step)
            seen[way].append(gradients(model))
    return seen


def _all_gradients(worker: int) -> dict[str, dict[str, list[Tensor]]]:
    return {label: _gradients(worker, label) for label in _settings()}


@pytest.mark.slow
def test_gradients_are_those_of_native_hsdp_in_every_setting():
    for settings in run_workers(_all_gradients, 4):
        for label, seen in settings.items():
            exact = {"rtol": 0, "atol": 0} if "accumulated" not in label else {"rtol": 1e-5, "atol": 1e-7}
            for way in seen:
                for ours, native in zip(seen[way], seen["native"], strict=True):
                    torch.testing.assert_close(ours, native, **exact, msg=f"{label}, {way}")


PLANS = [
    "power_sgd(rank=1)",
    "diloco(period=3)",
    "streaming_diloco(period=4, fragments=2, delay=1)",
]


@torch.no_grad()
def _test_loss(model: nn.Module) -> float:
    x, y = batch(worker=0, step=99)
    return F.mse_loss(model(x), y).item()


def _train(worker: int, text: str, way: str) -> tuple[list[float], Tensor, Tensor]:
    mesh = two_by_two()
    model, optimizer, session = attached(text, way, mesh, seed=worker)  # the first replica's weights are broadcast
    assert session is not None
    losses = [_test_loss(model)]
    steps(model, optimizer, worker, 36)
    losses.append(_test_loss(model))
    steps(model, optimizer, worker, 1, first=36)
    before = shards(model)
    session.average_weights()
    shard_bytes = 4 * before.numel()
    said = [entry for entry in session.ledger.entries if entry.phase != "control" and entry.step <= 36]
    assert {entry.op for entry in said} == {"all_to_all", "all_gather"}  # few bits: to a shard's owner, and back
    assert max(entry.payload_bytes for entry in said) <= shard_bytes
    if "power_sgd" in text:
        exactly = 36 * shard_bytes
        assert sum(entry.payload_bytes for entry in said) < exactly / 3
    else:  # silence: nothing but the rounds
        assert {entry.step for entry in said} == {step for step in range(1, 37) if session.plan.syncs_at(step)}
    return losses, before, shards(model)


def _as_one_worker(worker: int) -> tuple[Tensor, Tensor]:
    """A replica of two shards, and a bare module that sees the data of both."""
    mesh, text = two_by_two(), "diloco(period=2, lr=0.7, momentum=0.9, codec=Exact(), optimizer_state='average')"
    model, optimizer, _ = attached(text, "1-D", mesh)
    steps(model, optimizer, worker, 5)
    bare = net()
    of_bare = torch.optim.AdamW(bare.parameters(), lr=1e-2)
    laconic.attach(laconic.plan(text), bare, of_bare, group=mesh["replicate"].get_group())
    for step in range(5):
        x, y = (
            torch.cat(parts) for parts in zip(*(batch(worker // 2 * 2 + part, step) for part in (0, 1)), strict=True)
        )
        F.mse_loss(bare(x), y).backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 0.5)
        of_bare.step()
        of_bare.zero_grad()
    whole = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    return torch.cat([p.detach().reshape(-1) for p in whole]), weights(bare)


def test_a_sharded_replica_learns_what_a_whole_one_learns():
    results = run_workers(_as_one_worker, 4)
    for ours, whole in results:
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)
    assert not torch.equal(results[0][0], results[2][0]), "this is the first step of a round"


@pytest.mark.parametrize(
    ("text", "way"), [(PLANS[0], "1-D"), (PLANS[1], "2-D"), pytest.param(PLANS[2], "1-D", marks=pytest.mark.slow)]
)
def test_plans_train_sharded_models(text, way):
    results = run_workers(_train, 4, (text, way))
    for losses, _, _ in results:
        assert losses[1] < losses[0] / 3
    local = "power_sgd" not in text
    assert torch.equal(results[0][1], results[2][1]) != local, "replicas part in silence, and only then"
    assert_replicas_equal([after for _, _, after in results])
