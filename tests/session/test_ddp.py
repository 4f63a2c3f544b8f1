"""`attach` on DDP models: real workers, real gloo."""

from __future__ import annotations

import gc
import io
import warnings
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.laws.world import residuals
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import WorkerError, run_workers

PLANS = [
    "ddp()",
    "Plan(codec=Cast('bf16'))",
    "power_sgd(rank=2)",
    "power_sgd(rank=2, bits=None)",
    "power_sgd(rank=1, start=4)",
    "post_local_sgd(start=4, period=3)",
    "Plan(schedule=Every(3), codec=ErrorFeedback(LowRank(2)))",
]


def _loss(model: nn.Module, worker: int, step: int) -> Tensor:
    x, y = batch(worker, step)
    return F.cross_entropy(model(x), y)


def _train(worker: int, text: str | None, options: dict[str, Any]) -> Tensor:
    """Train; without a plan, with DDP alone."""
    module = mlp()
    ddp = DDP(module, bucket_cap_mb=0.01, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2, momentum=0.5)
    if text is not None:
        laconic.attach(laconic.plan(text), ddp, optimizer)
    for step in range(12):
        _loss(ddp, worker, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


def _many(worker: int, jobs: list[tuple[str | None, dict[str, Any]]]) -> list[Tensor]:
    return [_train(worker, text, options) for text, options in jobs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"gradient_as_bucket_view": True}, marks=pytest.mark.slow),
        pytest.param({"static_graph": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_replicas_stay_bit_equal_under_every_plan(options):
    results = run_workers(_many, 3, ([(text, options) for text in PLANS],))
    for index in range(len(PLANS)):
        assert_equal_bits([worker[index] for worker in results])


def test_ddp_plan_is_ddp_and_full_rank_equals_it_to_rounding():
    jobs = [None, "ddp()", "power_sgd(rank=32, bits=None, min_compression=0)"]
    results = run_workers(_many, 4, ([(text, {}) for text in jobs],))
    torch_ddp, ours, full_rank = results[0]
    assert torch.equal(torch_ddp, ours)
    torch.testing.assert_close(full_rank, torch_ddp, rtol=1e-5, atol=1e-6)


def _plain_sgd(worker: int, text: str | None) -> Tensor:
    module = mlp()
    ddp = DDP(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    if text is not None:
        laconic.attach(laconic.plan(text), ddp, optimizer)
    for step in range(10):
        _loss(ddp, worker, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


def test_post_local_with_period_one_and_plain_sgd_equals_ddp():
    ours = run_workers(_plain_sgd, 3, ("post_local_sgd(start=1, period=1)",))
    torch.testing.assert_close(ours[0], run_workers(_plain_sgd, 3, (None,))[0], rtol=1e-5, atol=1e-6)


def _local_steps(worker: int) -> tuple[list[int], list[bool]]:
    module = mlp()
    ddp = DDP(module, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    session = laconic.attach(laconic.post_local_sgd(start=3, period=4), ddp, optimizer)
    sent, together = [], []
    for step in range(10):
        _loss(ddp, worker, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        by_phase = session.ledger.totals(by="phase")
        sent.append(sum(total.payload_bytes for phase, total in by_phase.items() if phase != "control"))
        mine = weights(module)
        everyone = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(everyone, mine)
        together.append(torch.equal(everyone[0], everyone[1]))
    return sent, together


def test_local_steps_are_silent_and_rounds_bring_replicas_together():
    (sent, together), _ = run_workers(_local_steps, 2)
    size = 4 * sum(p.numel() for p in mlp().parameters())
    syncs = [1, 2, 6, 10]
    assert sent == [size * sum(t <= step for t in syncs) for step in range(1, 11)]
    assert together == [step in syncs for step in range(1, 11)]


def _accumulate(worker: int, text: str, no_sync: bool) -> Tensor:
    module = mlp()
    ddp = DDP(module, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    session = laconic.attach(laconic.plan(text), ddp, optimizer)
    for step in range(6):
        for micro in range(3):
            with ddp.no_sync() if no_sync and micro < 2 else nullcontext():
                (_loss(ddp, worker, 3 * step + micro) / 3).backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert session.step == 6
    return weights(module)


def test_gradient_accumulation_and_clipping():
    for text in ("power_sgd(rank=2)", "post_local_sgd(period=3)"):
        assert_equal_bits(run_workers(_accumulate, 2, (text, True)))
    once = run_workers(_accumulate, 2, ("ddp()", True))
    each = run_workers(_accumulate, 2, ("ddp()", False))
    torch.testing.assert_close(once[0], each[0], rtol=1e-4, atol=1e-6)


class Branches(nn.Module):
    """One of two layers is used, by worker and step; a third never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.never = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        result: Tensor = self.head((self.left if left else self.right)(x))
        return result


def _unused(worker: int, text: str, wrapped: bool) -> tuple[Tensor, bool]:
    module = Branches()
    before = module.never.weight.detach().clone()
    model = DDP(module, find_unused_parameters=True, bucket_cap_mb=0.01) if wrapped else module
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    laconic.attach(laconic.plan(text), model, optimizer)
    for step in range(12):
        x, y = batch(worker, step)
        F.cross_entropy(model(x, (step // 2 + worker) % 3 == 0), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(module), torch.equal(before, module.never.weight)


@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "bare"])
@pytest.mark.parametrize("text", ["ddp()", "power_sgd(rank=2)", "power_sgd(rank=2, bits=None)"])
def test_parameters_unused_on_some_workers(text, wrapped):
    results = run_workers(_unused, 3, (text, wrapped))
    assert_equal_bits([result for result, _ in results])
    assert all(result.isfinite().all() for result, _ in results)
    assert all(untouched for _, untouched in results), "a parameter that nobody used was moved"


def _with_feedback(worker: int, set_to_none: bool, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Train with weights that do not move; return what was delivered, what is kept, and the true gradients, summed."""
    module, alone = Branches(), Branches()
    ddp = DDP(module, find_unused_parameters=True, bucket_cap_mb=0.005, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    session = laconic.attach(laconic.power_sgd(rank=1, min_compression=0), ddp, optimizer)
    names = [name for name, p in module.named_parameters() if p.dim() == 2]
    delivered, true = ({name: torch.zeros_like(module.get_parameter(name)) for name in names} for _ in range(2))
    for step in range(20):
        left = step % 7 < 3 or (step % 7 == 3 and worker == 0)  # on all workers, on none, on one
        x, y = batch(worker, step)
        F.cross_entropy(ddp(x, left), y).backward()
        for name in names:
            p = module.get_parameter(name)
            delivered[name] += 0 if p.grad is None else p.grad
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)  # after it, no gradient is that of its bucket
        optimizer.step()
        optimizer.zero_grad(set_to_none)
        F.cross_entropy(alone(x, left), y).backward()
    for name in names:
        grad = alone.get_parameter(name).grad
        true[name] += 0 if grad is None else grad
    kept = residuals(session.state_dict()["state"]["gradient"])
    flat = [torch.cat([each[name].reshape(-1) for name in names]) for each in (delivered, kept, true)]
    return flat[0], flat[1], flat[2]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_error_feedback_keeps_what_ddp_drops(set_to_none, options):
    results = run_workers(_with_feedback, 2, (set_to_none, options))
    delivered, kept, true = (torch.stack(each).double().mean(0) for each in zip(*results, strict=True))
    torch.testing.assert_close(delivered + kept, true, rtol=1e-4, atol=1e-4 * float(true.norm()))
    assert kept.norm() > 0


def _bitmap(worker: int, find_unused: bool) -> tuple[list[int], int]:
    module = Branches()
    ddp = DDP(module, find_unused_parameters=find_unused, bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    session = laconic.attach(laconic.ddp(), ddp, optimizer)
    attached = len(session.ledger.entries)
    for step in range(3):
        x, y = batch(worker, step)
        loss = F.cross_entropy(ddp(x, True), y)
        if not find_unused:
            loss = loss + 0 * torch.stack([p.sum() for p in module.parameters()]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    control = [e.payload_bytes for e in list(session.ledger.entries)[attached:] if e.phase == "control"]
    return control, len(list(module.parameters()))


@pytest.mark.parametrize("find_unused", [True, False])
def test_ddps_bitmap_of_used_parameters_is_in_the_ledger(find_unused):
    for entries, parameters in run_workers(_bitmap, 2, (find_unused,)):
        assert entries == [4 * parameters] * 3 * find_unused


@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "bare"])
def test_a_missing_gradient_counts_as_zero(wrapped):
    ours, _ = run_workers(_unused, 3, ("ddp()", wrapped))[0]
    alone = Branches()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.5)
    for step in range(12):
        pairs = [(batch(worker, step), (step // 2 + worker) % 3 == 0) for worker in range(3)]
        torch.stack([F.cross_entropy(alone(x, left), y) for (x, y), left in pairs]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(ours, weights(alone), rtol=1e-4, atol=1e-5)


def _two_optimizers(worker: int, text: str, wrapped: bool) -> tuple[Tensor, int]:
    module = mlp()
    model = DDP(module) if wrapped else module
    parameters = list(model.parameters())
    first = torch.optim.SGD([{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:4], "lr": 0.2}])
    second = torch.optim.AdamW(parameters[4:], lr=0.01)
    session = laconic.attach(laconic.plan(text), model, [first, second])
    for step in range(8):
        _loss(model, worker, step).backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    return weights(module), session.step


@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "bare"])
def test_several_optimizers_and_parameter_groups(wrapped):
    for text in ("power_sgd(rank=2)", "post_local_sgd(period=4)"):
        results = run_workers(_two_optimizers, 2, (text, wrapped))
        assert_equal_bits([result for result, _ in results])
        assert [steps for _, steps in results] == [8, 8]


def _compiled(worker: int, text: str, outside: bool) -> Tensor:
    module = mlp()
    model: nn.Module = DDP(module) if outside else DDP(torch.compile(module, backend="eager"))
    if outside:
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    session = laconic.attach(laconic.plan(text), model, optimizer)
    for step in range(6):
        _loss(model, worker, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all("_orig_mod" not in name and not name.startswith("module.") for name in session.parameters)
    return weights(module)


@pytest.mark.parametrize(
    "outside", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["compile(DDP)", "DDP(compile)"]
)
def test_compiled_models(outside):
    for text in ("power_sgd(rank=2)", "post_local_sgd(period=3)"):
        assert_equal_bits(run_workers(_compiled, 2, (text, outside), timeout_s=120))


def _hooked_already(worker: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    ddp = DDP(mlp())
    ddp.register_comm_hook(None, allreduce_hook)
    laconic.attach(laconic.ddp(), ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))


def test_a_model_with_a_hook_of_its_own_is_refused():
    with pytest.raises(WorkerError, match="already has a communication hook, and DDP takes only one"):
        run_workers(_hooked_already, 1)


def _mixed(worker: int) -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp = DDP(mlp(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    laconic.attach(laconic.ddp(), ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="torch's DDP(mixed_precision=...) asks CUDA for a stream, and there is no GPU",
)
def test_mixed_precision_of_ddp_is_refused_by_its_name():
    with pytest.raises(WorkerError, match=r"DistributedDataParallel\(mixed_precision=...\) averages .* torch.autocast"):
        run_workers(_mixed, 1)


@pytest.mark.parametrize("lazy", [nn.LazyLinear(2), nn.LazyBatchNorm1d()], ids=["LazyLinear", "LazyBatchNorm1d"])
def test_a_lazy_module_is_refused_until_it_has_its_shape(lazy):
    model = nn.Sequential(lazy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"0.weight of Sequential is not initialized: .* Call model\(x\) with a batch"):
        laconic.attach("ddp()", model, optimizer)
    model(torch.ones(4, 3))
    laconic.attach("ddp()", model, optimizer).detach()


def _detach_and_attach_again(worker: int) -> tuple[Tensor, int, int]:
    module = mlp()
    ddp = DDP(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    with laconic.attach(laconic.post_local_sgd(period=2), ddp, optimizer) as first:
        for step in range(2):
            _loss(ddp, worker, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    for step in range(2, 4):  # plain DDP again
        _loss(ddp, worker, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    second = laconic.attach(laconic.power_sgd(rank=2), ddp, optimizer)
    for step in range(4, 6):
        _loss(ddp, worker, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(module), first.step, second.step


def test_detaching_gives_ddp_back_and_another_plan_can_follow():
    results = run_workers(_detach_and_attach_again, 2)
    assert_equal_bits([result[0] for result in results])
    assert results[0][1:] == (2, 2)


def _change(worker: int) -> tuple[Tensor, list[str]]:
    module = mlp()
    ddp = DDP(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    session = laconic.attach(laconic.post_local_sgd(period=4), ddp, optimizer)
    said = []
    for step in range(9):
        if step == 3:  # in the middle of a period: replicas have parted
            session.change(laconic.power_sgd(rank=1))
        said.append(repr(session.plan))
        _loss(ddp, worker, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(module), said


def test_the_plan_can_change_in_mid_run():
    results = run_workers(_change, 2)
    assert_equal_bits([result for result, _ in results])
    assert results[0][1] == ["post_local_sgd(period=4)"] * 3 + ["power_sgd(rank=1, bits=4)"] * 6


def _resume(worker: int, text: str, bucket_mb: float) -> tuple[Tensor, Tensor]:
    """Train 12 steps at one go; and 5, save, load into new objects with other buckets, 7 more."""

    def make(cap: float) -> tuple[nn.Module, DDP, torch.optim.Optimizer, laconic.Session]:
        module = mlp()
        ddp = DDP(module, bucket_cap_mb=cap)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2, momentum=0.9)
        return module, ddp, optimizer, laconic.attach(laconic.plan(text), ddp, optimizer)

    def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            _loss(ddp, worker, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    module, ddp, optimizer, _ = make(0.01)
    train(ddp, optimizer, range(12))
    whole = weights(module)

    module, ddp, optimizer, session = make(0.01)
    train(ddp, optimizer, range(5))
    saved = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "session": session.state_dict()}
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    module, ddp, optimizer, session = make(bucket_mb)
    loaded = torch.load(file, weights_only=True)
    module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    session.load_state_dict(loaded["session"])
    train(ddp, optimizer, range(5, 12))
    return whole, weights(module)


@pytest.mark.parametrize("bucket_mb", [0.01, pytest.param(25.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("text", PLANS[1:])
def test_resume_is_bit_exact_also_with_other_buckets(text, bucket_mb):
    for whole, resumed in run_workers(_resume, 2, (text, bucket_mb)):
        assert torch.equal(whole, resumed)


def _load_other_plan(worker: int) -> None:
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with laconic.attach(laconic.power_sgd(rank=2), module, optimizer) as session:
        saved = session.state_dict()
    laconic.attach(laconic.power_sgd(rank=4), module, optimizer).load_state_dict(saved)


def test_a_state_of_another_plan_is_refused():
    saved, given = (rf"power_sgd\(rank={rank}, bits=4\)" for rank in (2, 4))
    with pytest.raises(WorkerError, match=f"saved under {saved} and the plan is {given}"):
        run_workers(_load_other_plan, 1, group=False)


def _forgotten(worker: int) -> bool:
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    laconic.attach(laconic.power_sgd(rank=2), model, optimizer)
    x, y = batch(worker, 0)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    return alive() is not None


def test_a_model_that_is_dropped_without_detach_is_freed():
    assert run_workers(_forgotten, 2) == [False, False]
