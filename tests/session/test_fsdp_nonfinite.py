"""NaN on one worker of a sharded model: all shards of all replicas skip, raise or leave a replica out alike."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import laconic
from tests.session.sharding import assert_replicas_equal, batch, net, sharded, shards
from tests.workers import listen, run_workers

SICK, STEP, STEPS = 2, 3, 5
"""Worker 2 is in replica 1 of a 2 x 2 mesh, and in the only replica of a 1 x 4 mesh."""
POLICIES = ("skip", "exclude", "raise")
PLANS = ("ddp()", "quantized_ddp()", "power_sgd(rank=1)")


def _mesh(replicas: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicate", "shard"))


def _shard(mesh: DeviceMesh, several: bool, **options: Any) -> nn.Sequential:
    from torch.distributed.fsdp import fully_shard

    if several:
        return sharded(mesh, **options)
    model = net()
    fully_shard(model, mesh=mesh, **options)
    return model


def _spoil_last_row(_: nn.Module, __: Any, out: Tensor) -> None:
    """Let the gradient of the last row of the first layer be NaN, which only the last shard holds."""

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[:, -1] = torch.nan
        return gradient

    out.register_hook(spoil)


def _loss(model: nn.Module, worker: int, step: int, where: str) -> Tensor:
    x, y = batch(worker, step)
    hook = None
    if (worker, step) == (SICK, STEP) and where == "one shard":
        hook = model[0].register_forward_hook(_spoil_last_row)  # type: ignore[index]
    loss = F.mse_loss(model(x), y)
    if hook is not None:
        hook.remove()
    return loss * torch.nan if (worker, step) == (SICK, STEP) and where == "everywhere" else loss


def _train(
    worker: int,
    mesh: DeviceMesh,
    text: str,
    policy: str,
    several: bool = True,
    optimizer: str = "SGD",
    where: str = "everywhere",
    backwards: int = 1,
    clips: bool = False,
    **options: Any,
) -> tuple[list[Tensor], list[str]]:
    """Train with one sick step; return the shards after each step, and what was logged and raised."""
    said = listen()
    model = _shard(mesh, several, **options)
    of_model: Any = {
        "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    }[optimizer](model.parameters())
    trace = [shards(model)]
    clip = 0.5 if clips else None
    with laconic.attach(laconic.plan(text), model, of_model, nonfinite=policy, clip_norm=clip):  # type: ignore[arg-type]
        for step in range(1, STEPS + 1):
            for part in range(backwards):
                model.set_requires_gradient_sync(part == backwards - 1)  # type: ignore[operator]
                _loss(model, worker, step, where if part == 0 else "nowhere").backward()
            try:
                of_model.step()
            except laconic.NonFiniteError as error:
                said.append(f"{error} {error.workers}")
            of_model.zero_grad()
            trace.append(shards(model))
    return trace, said


def _check(label: str, results: list[tuple[list[Tensor], list[str]]], policy: str, replicas: int) -> None:
    """`results` are those of all four workers."""
    skips = policy != "exclude" or replicas == 1
    for trace, said in results:
        assert all(each.isfinite().all() for each in trace), label
        stood_still = [torch.equal(*pair) for pair in pairwise(trace)]
        assert stood_still == [step == STEP and skips for step in range(1, STEPS + 1)], label
        heard = " ".join(said)
        if not skips:
            assert "50% of the replicas had NaN or Inf, and were left out" in heard, label
        else:
            assert f"step {STEP}: replica {replicas - 1} had NaN or Inf, in 0.weight" in heard, (label, heard)
            assert ("No worker has stepped" in heard and f"[{replicas - 1}]" in heard) == (policy == "raise"), label
    if replicas == 2:
        for step in range(STEPS + 1):
            assert_replicas_equal([trace[step] for trace, _ in results])


def _each(worker: int, replicas: int, cases: list[tuple[Any, ...]]) -> list[tuple[list[Tensor], list[str]]]:
    mesh = _mesh(replicas)
    return [_train(worker, mesh, *case) for case in cases]


def _run_each(replicas: int, cases: list[tuple[Any, ...]], timeout_s: float = 60) -> None:
    results = run_workers(_each, 4, (replicas, cases), timeout_s)
    for index, case in enumerate(cases):
        _check(str((replicas, *case)), [each[index] for each in results], case[1], replicas)


@pytest.mark.parametrize("replicas", [2, 1], ids=["2x2", "1x4"])
def test_one_sick_worker(replicas):
    _run_each(replicas, [(*case, True, "SGD", "one shard") for case in product(["ddp()"], POLICIES)])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("replicas", [2, 1], ids=["2x2", "1x4"])
def test_one_sick_worker_in_every_setting(replicas, optimizer):
    cases = list(product(PLANS, POLICIES, (True, False), (optimizer,), ("everywhere", "one shard")))
    _run_each(replicas, cases, timeout_s=240)
