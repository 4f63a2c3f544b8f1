"""What surrounds the training of a sharded model: what is sent, saving, detaching, odd backwards, refusals."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import laconic
from tests.laws.world import same_bits
from tests.session.sharding import (
    assert_replicas_equal,
    attached,
    batch,
    gradients,
    sharded,
    shards,
    steps,
    two_by_two,
)
from tests.workers import run_workers

ROOT = Path(__file__).parents[2]


class Counted:
    """Counts calls of torch's collectives, whoever makes them, by name without what tells tensor from list."""

    OPS = (
        *("all_reduce", "broadcast", "all_to_all_single", "all_gather", "isend", "irecv"),
        *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"),
    )

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.elements: dict[str, int] = {}
        for name in self.OPS:
            if hasattr(dist, name):
                setattr(dist, name, self._counting(name, getattr(dist, name)))

    def restart(self) -> Counter[str]:
        calls, self.calls = self.calls, Counter()
        self.elements.clear()
        return calls

    def _counting(self, name: str, inner: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            sizes = [t.numel() for t in args if isinstance(t, Tensor)]
            self.elements[name] = max([self.elements.get(name, 0), *sizes])
            return inner(*args, **kwargs)

        return counting


def _count(worker: int) -> None:
    mesh, counted = two_by_two(), Counted()
    alone = sharded(mesh["shard"])
    steps(alone, torch.optim.AdamW(alone.parameters()), worker, 6)
    of_fsdp = counted.restart()
    for way in ("1-D", "2-D"):
        model, optimizer, session = attached("diloco(period=3, codec=Exact())", way, mesh)
        assert session is not None
        first = session.ledger.collectives
        assert counted.restart() == {"all_reduce": first}, "when attaching"
        steps(model, optimizer, worker, 6)
        assert session.ledger.totals(by="phase")["weights"].collectives == 2
        assert all(e.payload_bytes <= 8 * 64 for e in session.ledger.entries if e.phase == "control")
        assert counted.elements["all_reduce"] == shards(model).numel()
        # A header before and a digest after each of the two rounds, and for both one inside the replica.
        assert counted.restart() - of_fsdp == {"all_reduce": 2 + 4 + 4}


def test_nothing_is_gathered_but_by_fsdp_itself():
    run_workers(_count, 4)


def _save_and_resume(worker: int, text: str, way: str, folder: str) -> list[Tensor]:
    from torch.distributed.checkpoint import load, save  # type: ignore[attr-defined]
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    path, model_state = f"{folder}/replica-{mesh['replicate'].get_local_rank()}", mesh["shard"].get_group()
    model, optimizer, session = attached(text, way, mesh)
    assert session is not None
    steps(model, optimizer, worker, 6)
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": moments}, checkpoint_id=path, process_group=model_state)
    torch.save(session.state_dict(), f"{folder}/session-{worker}.pt")
    steps(model, optimizer, worker, 6, first=6)
    straight = shards(model)
    session.detach()

    model = sharded(mesh["shard"] if way == "1-D" else mesh, seed=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights, moments = get_state_dict(model, optimizer)  # takes a step, so that there are moments to load
    session = laconic.attach(laconic.plan(text), model, optimizer, group=mesh["replicate"].get_group())
    load({"model": weights, "optimizer": moments}, checkpoint_id=path, process_group=model_state)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    session.load_state_dict(torch.load(f"{folder}/session-{worker}.pt", weights_only=True))
    steps(model, optimizer, worker, 6, first=6)
    return [straight, shards(model)]


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("power_sgd(rank=1)", "2-D"),
        pytest.param("diloco(period=3)", "1-D", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_from_a_checkpoint_to_the_last_bit(text, way, tmp_path):
    for straight, resumed in run_workers(_save_and_resume, 4, (text, way, str(tmp_path))):
        assert torch.equal(straight, resumed)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("quantized_ddp(bits=2)", "2-D"),
        ("Plan(codec=ErrorFeedback(TopK(0.05)))", "1-D"),
        ("sparse_loco(period=4)", "2-D"),
        ("frugal('30x', delay=1)", "1-D"),
        ("streaming_diloco(period=4, fragments=2, delay=1)", "2-D"),
    ],
)
def test_a_run_in_few_bits_goes_on_to_the_last_bit(text, way, workers, tmp_path):
    for straight, resumed in run_workers(_save_and_resume, workers, (text, way, str(tmp_path))):
        assert torch.equal(straight, resumed)


def _detach(worker: int) -> None:
    mesh = two_by_two()
    native, of_native, _ = attached("ddp()", "native", mesh)
    model, optimizer, session = attached("ddp()", "2-D", mesh)
    assert session is not None
    with pytest.raises(RuntimeError, match=r"has a session already.*session\.detach\(\)"):
        laconic.attach(laconic.ddp(), model, optimizer)
    before = steps(native, of_native, worker, 3)
    assert steps(model, optimizer, worker, 3) == before
    session.detach()
    counted = Counted()
    after = steps(native, of_native, worker, 3, first=3)
    of_native_calls = counted.restart()
    assert steps(model, optimizer, worker, 3, first=3) == after
    assert counted.restart() == of_native_calls, "torch sends as before, and nothing else does"
    with laconic.attach(laconic.diloco(period=2), model, optimizer) as again:
        steps(model, optimizer, worker, 1, first=6)
        assert again.ledger.totals(by="phase").get("gradient") is None
    one, _, session = attached("ddp()", "1-D", mesh)
    assert session is not None
    session.detach()
    F.mse_loss(one(batch(worker, 0)[0]), batch(worker, 0)[1]).backward()
    mine = gradients(one)
    theirs = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(theirs, mine, group=mesh["replicate"].get_group())
    assert not torch.equal(*theirs), "on a 1-D mesh nobody averages between replicas"


@pytest.mark.slow
def test_detaching_gives_the_model_back_to_torch():
    run_workers(_detach, 4)


class Odd(nn.Module):
    """A unit that runs twice, and one of which a part is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.partly = nn.ModuleDict({"used": nn.Linear(8, 1), "unused": nn.Linear(8, 5)})
        self.partly.forward = lambda x: self.partly["used"](x)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.partly["used"](self.again(self.frozen(self.again(x))))
        return result


def _odd(worker: int) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = two_by_two()
    seen: list[list[Tensor]] = []
    for way in ("native", "1-D", "2-D"):
        model: Any = Odd()
        fully_shard(model.again, mesh=mesh["shard"] if way == "1-D" else mesh)
        fully_shard(model, mesh=mesh["shard"] if way == "1-D" else mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if way != "native":
            laconic.attach(laconic.ddp(), model, optimizer, group=mesh["replicate"].get_group())
        seen.append([])
        for step in range(2):
            for _ in range(2):
                F.mse_loss(model(batch(worker, step)[0]), batch(worker, step)[1]).backward()
            seen[-1].append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
    for ours in seen[1:]:
        torch.testing.assert_close(ours, seen[0], rtol=1e-5, atol=1e-7)


def test_units_that_run_twice_or_are_not_used_whole():
    run_workers(_odd, 4)


def _scaled(worker: int, text: str) -> tuple[Tensor, int, int]:
    """Worker 1 overflows at step 3: in its own replica's local step, or in everybody's averaged one."""
    model, optimizer, session = attached(text, "2-D", two_by_two())
    assert session is not None
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=1000)
    skipped = 0
    for step in range(6):
        x, y = batch(worker, step)
        loss = F.mse_loss(model(x), y) * (float("inf") if worker == 1 and step == 3 else 1.0)
        scaler.scale(loss).backward()
        before = shards(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped += int(torch.equal(before, shards(model)))
    assert shards(model).isfinite().all()
    return shards(model), session.step, skipped


@pytest.mark.parametrize(("text", "skips"), [("ddp()", [1, 1, 1, 1]), ("post_local_sgd(period=3)", [1, 1, 0, 0])])
def test_a_step_that_gradscaler_skips_in_one_replica(text, skips):
    results = run_workers(_scaled, 4, (text,))
    assert [taken for _, taken, _ in results] == [6] * 4
    assert [skipped for _, _, skipped in results] == skips
    assert_replicas_equal([final for final, _, _ in results])


def _between_sites(worker: int) -> tuple[Tensor, Tensor]:
    """Two sites of two replicas each: torch averages inside a site, laconic between them."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("site", "replicate", "shard"))
    model = sharded(mesh["replicate", "shard"])
    with torch.no_grad():
        model(batch(worker, 0)[0])  # leaves the last unit whole
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    laconic.attach(
        laconic.diloco(period=3),
        model,
        optimizer,
        group=mesh["site"].get_group(),
    )
    steps(model, optimizer, worker, 2)
    apart = shards(model)
    steps(model, optimizer, worker, 1, first=2)
    return apart, shards(model)


def test_native_hsdp_inside_a_site_and_a_plan_between_sites():
    results = run_workers(_between_sites, 4)
    apart = [before for before, _ in results]
    assert torch.equal(apart[0], apart[1]) and not torch.equal(apart[0], apart[2])
    assert all(torch.equal(after, results[0][1]) for _, after in results)


def _spoiled(worker: int, text: str) -> list[Any]:
    """Let a backward hold NaN on one worker after its first unit; then go on."""
    model, optimizer, session = attached(text, "2-D", two_by_two())
    assert session is not None
    steps(model, optimizer, worker, 3)
    before = copy.deepcopy(session.state_dict()["state"]["gradient"])

    def spoil(_: nn.Module, __: Any, out: Tensor) -> None:
        out.register_hook(lambda gradient: gradient * torch.nan if worker == 0 else gradient)

    x, y = batch(worker, 3)
    hook = model[1].register_forward_hook(spoil)  # type: ignore[index]
    F.mse_loss(model(x), y).backward()
    hook.remove()
    optimizer.zero_grad()
    stayed = same_bits(session.state_dict()["state"]["gradient"], before)
    steps(model, optimizer, worker, 2, first=4)
    return [stayed, shards(model)]


def test_nan_in_some_units_leaves_the_state_of_every_unit_as_it_was():
    results = run_workers(_spoiled, 4, ("power_sgd(rank=1)",))
    assert [stayed for stayed, _ in results] == [True] * 4
    assert_replicas_equal([weights for _, weights in results])
    assert all(weights.isfinite().all() for _, weights in results)
