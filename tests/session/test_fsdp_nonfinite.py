"""NaN on one worker of a sharded model: all shards of all replicas skip, raise or leave a replica out alike."""

from __future__ import annotations

import copy
import os
import signal
from collections import Counter
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import laconic
from laconic.session.live_model import local_of
from tests.laws.world import same_bits
from tests.session.models import weights
from tests.session.sharding import assert_replicas_equal, batch, net, sharded, shards
from tests.workers import listen, run_workers

STEP, STEPS = 3, 5
"""The last worker is sick in step 3: in the last replica, of which it holds the last shards."""
POLICIES = ("skip", "exclude", "raise")
PLANS = ("ddp()", "quantized_ddp()", "power_sgd(rank=1)")


def _mesh(replicas: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replicate", "shard"))


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


def _loss(model: nn.Module, worker: int, step: int, where: str, dtype: torch.dtype = torch.float32) -> Tensor:
    x, y = batch(worker, step, dtype)
    hook, sick = None, step == STEP and worker == dist.get_world_size() - 1
    if sick and where == "one shard":
        hook = model[0].register_forward_hook(_spoil_last_row)  # type: ignore[index]
    loss = F.mse_loss(model(x), y)
    if hook is not None:
        hook.remove()
    return loss * torch.nan if sick and where == "everywhere" else loss


def _train(
    worker: int,
    mesh: DeviceMesh,
    text: str,
    policy: str,
    several: bool = True,
    optimizer: str = "SGD",
    where: str = "everywhere",
    backwards: tuple[str, ...] = ("averaged",),
    clips: bool = False,
    way: str = "2-D",
) -> tuple[list[Tensor], list[str]]:
    """Train with one sick step; return the shards after each step, and what was logged and raised."""
    said = listen()
    model = _shard(mesh if way == "2-D" else mesh["shard"], several)
    group = None if way == "2-D" else mesh["replicate"].get_group()
    of_model: Any = {
        "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    }[optimizer](model.parameters())
    trace = [shards(model)]
    plan, clip = laconic.plan(text), 0.5 if clips else None
    with laconic.attach(plan, model, of_model, group=group, nonfinite=policy, clip_norm=clip):  # type: ignore[arg-type]
        for step in range(1, STEPS + 1):
            for part, backward in enumerate(backwards):
                model.set_requires_gradient_sync(backward != "held")  # type: ignore[operator]
                model.set_requires_all_reduce(backward == "averaged")  # type: ignore[operator]
                _loss(model, worker, step, where if part == 0 else "nowhere").backward()
            try:
                of_model.step()
            except laconic.NonFiniteError as error:
                said.append(f"{error} {error.workers}")
            of_model.zero_grad()
            trace.append(shards(model))
    return trace, said


def _check(label: str, results: list[tuple[list[Tensor], list[str]]], policy: str, replicas: int) -> None:
    """Check the `results` of all workers."""
    skips = policy != "exclude" or replicas == 1
    each = "worker" if replicas == len(results) else "replica"
    for trace, said in results:
        assert all(each.isfinite().all() for each in trace), label
        stood_still = [torch.equal(*pair) for pair in pairwise(trace)]
        assert stood_still == [step == STEP and skips for step in range(1, STEPS + 1)], label
        heard = " ".join(said)
        if not skips:
            assert f"50% of the {each}s had NaN or Inf, and were left out" in heard, label
        else:
            assert f"step {STEP}: {each} {replicas - 1} had NaN or Inf, in 0.weight" in heard, (label, heard)
            assert ("No worker has stepped" in heard and f"[{replicas - 1}]" in heard) == (policy == "raise"), label
    for step, replica in product(range(STEPS + 1), range(1, replicas)):
        for here, first in zip(results[replica * len(results) // replicas :], results, strict=False):
            assert torch.equal(here[0][step], first[0][step]), label


def _each(worker: int, replicas: int, cases: list[tuple[Any, ...]]) -> list[tuple[list[Tensor], list[str]]]:
    mesh = _mesh(replicas)
    return [_train(worker, mesh, *case) for case in cases]


def _run_each(replicas: int, cases: list[tuple[Any, ...]], timeout_s: float = 60, workers: int = 4) -> None:
    results = run_workers(_each, workers, (replicas, cases), timeout_s)
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


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 1], ids=["2x1", "1x2"])
def test_one_sick_worker_of_two(replicas):
    cases = [(*case, True, "SGD", "one shard") for case in product(PLANS, POLICIES)]
    _run_each(replicas, cases, timeout_s=120, workers=2)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 1], ids=["2x2", "1x4"])
def test_one_sick_worker_of_a_model_whose_mesh_has_no_replicas(replicas):
    cases = [(*case, True, "AdamW", "one shard", ("averaged",), False, "1-D") for case in product(PLANS, POLICIES)]
    _run_each(replicas, cases, timeout_s=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [("held",), ("kept local",), ("averaged",), ()], ids=["held", "kept-local", "averaged-twice", "clipped"]
)
def test_one_sick_worker_with(first):
    backwards, clips = (*first, "averaged"), not first
    cases = [(*case, True, "SGD", "one shard", backwards, clips) for case in product(PLANS[1:], POLICIES)]
    _run_each(2, cases, timeout_s=120)


def _in_half(worker: int, text: str) -> tuple[list[bool], list[Tensor]]:
    """Reduce in bf16, so that FSDP waits for each exchange: NaN is in the unit that is reduced last."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    half = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16, cast_forward_inputs=False)
    model = _shard(_mesh(2), several=True, mp_policy=half)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stayed, trace = [], []
    with laconic.attach(laconic.plan(text), model, optimizer) as session:
        for step in range(1, STEPS + 1):
            before = copy.deepcopy(session.state_dict()["state"]["gradient"])
            _loss(model, worker, step, "one shard", torch.bfloat16).backward()
            optimizer.step()
            optimizer.zero_grad()
            stayed.append(same_bits(session.state_dict()["state"]["gradient"], before))
            trace.append(shards(model))
    return stayed, trace


def test_units_that_were_averaged_before_the_sick_one_keep_nothing_of_the_step():
    for stayed, trace in run_workers(_in_half, 4, ("power_sgd(rank=1)",)):
        assert stayed == [step == STEP for step in range(1, STEPS + 1)]
        assert [torch.equal(*pair) for pair in pairwise(trace)] == [False, True, False, False]
        assert trace[-1].isfinite().all()


def _whole(worker: int, several: bool) -> list[tuple[Tensor, Tensor]]:
    """Leave the sick replica out, beside a bare model on the other's data in the units that were sick."""
    mesh = _mesh(2)
    model, bare = _shard(mesh, several), net()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, bare)]
    seen = []
    with laconic.attach(laconic.ddp(), model, optimizers[0], nonfinite="exclude"):
        for step in range(1, STEPS + 1):
            _loss(model, worker, step, "one shard").backward()
            everyone = torch.stack([F.mse_loss(bare(x), y) for x, y in (batch(w, step) for w in range(4))])
            blocks = [p for block in (bare[1], bare[2]) for p in block.parameters()] if several else []
            if step == STEP:  # units without NaN average all workers
                of_blocks = torch.autograd.grad(everyone.mean(), blocks, retain_graph=True) if blocks else []
                everyone[:2].mean().backward()
                for p, gradient in zip(blocks, of_blocks, strict=True):
                    p.grad = gradient
            else:
                everyone.mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            whole = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
            seen.append((torch.cat([p.detach().reshape(-1) for p in whole]), weights(bare)))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_without_the_sick_replica_the_mean_is_that_of_the_others(several):
    for seen in run_workers(_whole, 4, (several,)):
        for ours, whole in seen:
            torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)


def _skipping(worker: int) -> list[Tensor]:
    """Only the worker that sees NaN skips the step; the others call their optimizers."""
    model = _shard(_mesh(2), several=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    trace = []
    with laconic.attach(laconic.quantized_ddp(), model, optimizer, clip_norm=0.5) as session:
        for step in range(1, STEPS + 1):
            loss = _loss(model, worker, step, "everywhere")
            loss.backward()
            if loss.isfinite():
                optimizer.step()
            else:
                session.skip()
            optimizer.zero_grad()
            trace.append(shards(model))
    return trace


@pytest.mark.slow
def test_the_sick_worker_may_skip_the_step_by_itself():
    results = run_workers(_skipping, 4)
    assert_replicas_equal([trace[-1] for trace in results])
    for trace in results:
        assert trace[-1].isfinite().all()
        assert [torch.equal(*pair) for pair in pairwise(trace)] == [False, True, False, False]


def _overflowing(worker: int) -> tuple[list[Tensor], list[float]]:
    """Let one shard overflow under a GradScaler."""
    model = _shard(_mesh(2), several=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=1000)
    trace, scales = [], []
    with laconic.attach(laconic.power_sgd(rank=1), model, optimizer, scaler=scaler):
        for step in range(1, STEPS + 1):
            scaler.scale(_loss(model, worker, step, "one shard")).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            trace.append(shards(model))
            scales.append(scaler.get_scale())
    return trace, scales


@pytest.mark.slow
def test_one_shard_overflows_under_a_gradscaler():
    results = run_workers(_overflowing, 4)
    assert_replicas_equal([trace[-1] for trace, _ in results])
    for trace, scales in results:
        assert trace[-1].isfinite().all()
        assert [torch.equal(*pair) for pair in pairwise(trace)] == [False, True, False, False]
        assert scales == [128.0, 128.0, 64.0, 64.0, 64.0]


def _sick_weights(worker: int, cases: list[tuple[str, str]]) -> list[tuple[list[Tensor], str]]:
    """One shard of one replica becomes NaN in the last local step before weights are averaged."""
    mesh, found = _mesh(2), []
    for text, policy in cases:
        said = listen()
        model = _shard(mesh, several=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trace = []
        with laconic.attach(laconic.plan(text), model, optimizer, nonfinite=policy):  # type: ignore[arg-type]
            for step in range(1, 3 * STEP + 1):
                _loss(model, worker, step, "one shard").backward()
                try:
                    optimizer.step()
                except laconic.NonFiniteError as error:
                    said.append(f"{error} {error.workers}")
                    break
                optimizer.zero_grad()
                trace.append(shards(model))
        found.append((trace, " ".join(said)))
    return found


WEIGHT_PLANS = (
    "post_local_sgd(period=3)",
    "diloco(period=3)",
    "frugal('16x')",
    "frugal('60x')",
    "streaming_diloco(period=3, fragments=3, delay=1)",
)


@pytest.mark.parametrize(
    "texts", [WEIGHT_PLANS[:1], pytest.param(WEIGHT_PLANS[1:], marks=pytest.mark.slow)], ids=["one", "others"]
)
def test_a_replica_with_a_sick_shard_takes_all_weights_of_the_others(texts):
    cases = [*product(texts, ("skip", "exclude")), (texts[0], "raise")]
    results = run_workers(_sick_weights, 4, (cases,), timeout_s=120)
    for index, (text, policy) in enumerate(cases):
        now = [each[index] for each in results]
        if policy == "raise":
            assert all(len(trace) == STEP - 1 and "replica 1 had NaN or Inf" in said for trace, said in now), text
            assert all("[1]" in said for _, said in now)
            continue
        assert all(trace[-1].isfinite().all() for trace, _ in now), (text, policy)
        assert all("weights: replica 1 had NaN or Inf" in said for _, said in now), (text, policy)
        if "period=3)" in text:
            for step in (STEP, 3 * STEP):
                assert_replicas_equal([trace[step - 1] for trace, _ in now])


def _signalled(worker: int) -> int:
    """Only one worker gets the signal."""
    model = _shard(_mesh(2), several=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.ddp(), model, optimizer) as session:
        session.stop_on(signal.SIGUSR1, every_s=0.001)
        for step in range(1, 200):
            if step == 4 and worker == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
            _loss(model, worker, step, "nowhere").backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.should_stop:
                break
        return session.step


def test_all_shards_stop_after_the_same_step():
    (stopped,) = set(run_workers(_signalled, 4))
    assert 4 <= stopped < 199


def _flipped(worker: int) -> str:
    model = _shard(_mesh(2), several=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.ddp(), model, optimizer, verify_every=1) as session:
        for step in range(1, 6):
            if step == 3 and worker == 2:
                local_of(model.get_parameter("1.up.weight")).view(torch.int32)[3, 4] ^= 1 << 7
            _loss(model, worker, step, "nowhere").backward()
            try:
                optimizer.step()
            except laconic.DivergedError as error:
                return f"{error} {error.workers} at {session.step}"
            optimizer.zero_grad()
    return "nothing was noticed"


def test_a_bit_that_flips_in_one_shard_is_an_error_on_all_workers():
    for said in run_workers(_flipped, 4):
        assert "after step 3, replica" in said and "first in 1.up.weight" in said and said.endswith("at 3")


def _parallel(worker: int, policy: str, dims: int) -> tuple[list[Tensor], str]:
    """A bare module with a weight that is sharded by hand, as tensor parallelism shards it."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    said, names = listen(), ("rows", "columns")[:dims]
    mesh = init_device_mesh("cpu", (2, 2) if dims == 1 else (1, 2, 2), mesh_dim_names=("replicate", *names))
    shard_mesh, placements = mesh[names], [Shard(0), Shard(1)][:dims]
    model = nn.Linear(8, 4, bias=False)
    torch.manual_seed(0)
    weight = torch.randn(4, 8)
    model.weight = nn.Parameter(distribute_tensor(weight, shard_mesh, placements))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = [local_of(model.weight).clone()]
    group = mesh["replicate"].get_group()
    with laconic.attach(laconic.power_sgd(rank=1), model, optimizer, group=group, nonfinite=policy):  # type: ignore[arg-type]
        for step in range(1, STEPS + 1):
            gradient = torch.full((2, 8 // dims), torch.nan if (step, worker) == (STEP, 3) else float(worker + step))
            model.weight.grad = DTensor.from_local(gradient, shard_mesh, placements)
            try:
                optimizer.step()
            except laconic.NonFiniteError as error:
                said.append(str(error))
            trace.append(local_of(model.weight).clone())
    return trace, " ".join(said)


@pytest.mark.parametrize(
    ("policy", "dims"),
    [("skip", 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("raise", 1), ("skip", 2)))],
)
def test_a_weight_that_is_sharded_by_hand(policy, dims):
    for trace, said in run_workers(_parallel, 4, (policy, dims)):
        assert [torch.equal(*pair) for pair in pairwise(trace)] == [step == STEP for step in range(1, STEPS + 1)]
        assert f"step {STEP}: replica {2 - dims} had NaN or Inf, in weight" in said


def _counted(worker: int) -> list[dict[int, int]]:
    """Count the collectives inside a replica, for two steps of three units under each policy."""
    mesh, found = _mesh(2), []
    for policy in (*POLICIES, "ignore"):
        model = _shard(mesh, several=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with laconic.attach(laconic.power_sgd(rank=1), model, optimizer, nonfinite=policy) as session:  # type: ignore[arg-type]
            for step in (1, 2):
                _loss(model, worker, step, "nowhere").backward()
                optimizer.step()
                optimizer.zero_grad()
            inside = [each for each in session.ledger.entries if each.level == "shards" and each.step > 0]
            assert all(each.payload_bytes == 8 for each in inside)
            found.append(dict(Counter(each.step for each in inside)))
    return found


def test_the_shards_of_a_replica_exchange_one_number_in_a_step():
    for skip, exclude, refuse, ignore in run_workers(_counted, 4):
        assert skip == refuse == {1: 1, 2: 1}
        assert exclude == {1: 1 + 3, 2: 1 + 3}, "one for each unit: its replica is left out as a whole"
        assert ignore == {}
