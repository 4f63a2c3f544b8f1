"""Rows D13 to D22: averagers, post-local SGD and its optimizer. Each passes over the twin and fails over torch."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.algorithms.implementations import (
    Collectives,
    averagers,
    averaging,
    defect,
    hierarchical,
    module,
    post_local,
)
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import run_workers


def _average(implementation: str, parameters: Any) -> None:
    averaging(implementation).average_parameters_or_parameter_groups(parameters, None)


def _gradients_on_different_parameters(worker: int, implementation: str) -> list[float]:
    """Worker 0 has a gradient for the first parameter only, worker 1 for the second; the third has none anywhere."""
    first, second, third = (
        nn.Parameter(torch.tensor(value)) for value in ([1.0, 50.0, 7.0], [3.0, 100.0, 9.0])[worker]
    )
    (second if worker else first).sum().backward()
    _average(implementation, [first, second, third])
    return [float(p.detach()) for p in (first, second, third)]


@defect(torch_shows=r"averaged to \[50.5, 50.0, 7.0\]")
def test_d13_what_is_averaged_does_not_depend_on_gradients(implementation):
    for found in run_workers(_gradients_on_different_parameters, 2, (implementation,)):
        assert found == [2.0, 75.0, 8.0], f"1 and 3, 50 and 100, 7 and 9 averaged to {found}"


def _after_zero_grad(worker: int, implementation: str) -> float:
    p = nn.Parameter(torch.tensor([float(worker)]))
    p.sum().backward()
    torch.optim.SGD([p], lr=0.0).zero_grad()
    _average(implementation, [p])
    return float(p.detach())


@defect(torch_shows="torch.cat")
def test_d13_averaging_after_zero_grad(implementation):
    assert run_workers(_after_zero_grad, 2, (implementation,)) == [0.5, 0.5]


def _other_order(worker: int, implementation: str) -> str:
    parameters = [nn.Parameter(torch.full(shape, float(index))) for index, shape in enumerate([(2, 3), (3, 2)])]
    for p in parameters:
        p.sum().backward()
    try:
        _average(implementation, parameters[:: -1 if worker else 1])
    except RuntimeError as error:
        return str(error)
    return f"silently averaged to {[p.detach().unique().tolist() for p in parameters]}"


@defect(torch_shows="silently averaged")
def test_d14_another_order_is_named(implementation):
    for said in run_workers(_other_order, 3, (implementation,)):
        assert "worker 1 has parameter 0: parameter 0 [3, 2]" in said and "worker 0 has" in said, said


def _what_becomes_of_memory(worker: int, implementation: str) -> dict[str, bool]:
    linear = nn.Linear(8, 4)
    conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = nn.Sequential(conv, nn.Flatten(), linear)
    model(torch.randn(2, 3, 3, 3)).sum().backward()
    view = linear.weight.detach()
    before = [(p.data_ptr(), p.stride()) for p in model.parameters()]
    _average(implementation, model.parameters())
    file = io.BytesIO()
    torch.save(linear.weight, file)
    return {
        "addresses kept": [a for a, _ in before] == [p.data_ptr() for p in model.parameters()],
        "strides kept": [s for _, s in before] == [p.stride() for p in model.parameters()],
        "views follow": torch.equal(view, linear.weight.detach()) and view.data_ptr() == linear.weight.data_ptr(),
        "storage is its own": linear.weight.untyped_storage().nbytes() == 4 * 8 * 4,
    }


@defect(torch_shows="addresses kept.*strides kept.*views follow.*storage is its own")
def test_d15_parameters_keep_their_memory(implementation):
    for found in run_workers(_what_becomes_of_memory, 2, (implementation,)):
        lost = [fact for fact, holds in found.items() if not holds]
        assert not lost, f"no longer true after averaging: {lost}"


def _equal_replicas(worker: int, implementation: str) -> dict[str, bool]:
    unchanged = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        p = nn.Parameter((torch.randn(500) * 1e-3).to(dtype))
        before = p.detach().clone()
        p.sum().backward()
        _average(implementation, [p])
        unchanged[str(dtype)] = torch.equal(before, p.detach())
    return unchanged


@defect(torch_shows="equal replicas changed in .'torch.float32', 'torch.bfloat16', 'torch.float16'")
def test_d16_equal_replicas_stay_equal(implementation):
    for unchanged in run_workers(_equal_replicas, 3, (implementation,)):
        changed = [dtype for dtype, same in unchanged.items() if not same]
        assert not changed, f"equal replicas changed in {changed}"


def _mixed_dtypes(worker: int, implementation: str) -> int:
    """Return how many bytes are handed to collectives for 2000 bytes of bf16 and 40 of fp32."""
    parameters = [nn.Parameter(torch.ones(1000, dtype=torch.bfloat16)), nn.Parameter(torch.ones(10))]
    for p in parameters:
        p.sum().backward()
    _average(implementation, parameters)  # workers come to an agreement in their first round
    seen = Collectives.watch()
    _average(implementation, parameters)
    return sum(seen.sizes_bytes)


@defect(torch_shows="4040 bytes")
def test_d16_each_dtype_travels_by_itself(implementation):
    for sent in run_workers(_mixed_dtypes, 2, (implementation,)):
        # A sum in fp32 of bf16: every worker hands out its numbers, then its share of the means.
        assert sent == 2000 + 1000 + 40 + 4, f"{sent} bytes for 2000 of bf16 and 40 of fp32"


def _batch_norm(worker: int, implementation: str) -> tuple[int, list[Tensor]]:
    """Local SGD with a round after every third step: broadcasts in it, and running means after each step."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = None
    if implementation == "laconic":
        laconic.attach(laconic.post_local_sgd(period=3), model, optimizer)
    else:
        hook = post_local(implementation)
        model.register_comm_hook(hook.PostLocalSGDState(None, None, 0, False), hook.post_localSGD_hook)
        averager = averagers(implementation).PeriodicModelAverager(period=3)
        averager.step = 1  # as if one step had been: averages after the third
    plain, broadcasts = dist._broadcast_coalesced, []  # type: ignore[attr-defined]

    def counted(*args: Any) -> None:
        broadcasts.append(args)
        plain(*args)

    dist._broadcast_coalesced = counted  # type: ignore[attr-defined,assignment]
    means = []
    for step in range(3):
        x, y = batch(worker, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if averager is not None:
            averager.average_parameters(model.parameters())
        statistics = model.module[1].running_mean
        means.append(statistics.clone())
    return len(broadcasts), means


@defect(torch_shows=r"\d+ broadcasts of buffers in 3 local steps")
def test_d17_no_hidden_traffic_and_buffers_come_together(implementation):
    (talked, first), (_, second) = run_workers(_batch_norm, 2, (implementation,))
    assert torch.equal(first[-1], second[-1]), (
        f"buffers apart after a round; {talked} broadcasts of buffers in 3 local steps"
    )
    assert not torch.equal(first[0], second[0]), "buffers came together in a local step"
    assert not talked


HIERARCHIES: dict[str, list[tuple[int, int]]] = {
    "unsorted periods": [(4, 2), (2, 4)],
    "a period of 0": [(2, 2), (0, 4)],
    "a smaller group on a longer period": [(2, 4), (4, 2), (8, 4)],
    "negative period": [(2, 2), (-4, 4)],
}


def _hierarchies(worker: int, implementation: str) -> list[str]:
    accepted = []
    for name, levels in HIERARCHIES.items():
        try:
            hierarchical(implementation).HierarchicalModelAverager(OrderedDict(levels))
        except ValueError as error:
            if str(levels[1][0]) not in str(error) and str(levels[1][1]) not in str(error):
                accepted.append(f"{name}, refused without its numbers: {error}")
        else:
            accepted.append(name)
    return accepted


@defect(torch_shows="accepted: .*unsorted periods.*a period of 0.*a smaller group on a longer period.*negative period")
def test_d18_hierarchies_that_cannot_be_meant_are_refused(implementation):
    for accepted in run_workers(_hierarchies, 4, (implementation,)):
        assert not accepted, f"accepted: {accepted}"


def _two_data_parallel_groups(worker: int, implementation: str) -> float:
    """Workers 0 and 1 average in two levels, 2 and 3 among themselves in one: each pair minds its own business."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    levels = OrderedDict([(1, 1), (2, 2)] if worker < 2 else [(2, 2)])
    averager = hierarchical(implementation).HierarchicalModelAverager(levels, process_group=groups[worker // 2])
    p = nn.Parameter(torch.tensor([float(worker)]))
    p.sum().backward()
    averager.average_parameters([p])
    total = p.detach().clone()
    dist.all_reduce(total, group=dist.new_group())  # all four again, for whatever else
    assert float(total) == 6.0
    return float(p.detach())


@defect(torch_shows="did not end within|raised:|died with exit code")
def test_d18_two_groups_in_one_world(implementation):
    assert run_workers(_two_data_parallel_groups, 4, (implementation,), timeout_s=20) == [0.5, 0.5, 2.5, 2.5]


def _warm_up_mismatch(worker: int, implementation: str) -> str:
    model = DDP(mlp(width=32))
    hook = post_local(implementation)
    subgroup = dist.new_group([worker], use_local_synchronization=True)
    model.register_comm_hook(hook.PostLocalSGDState(None, subgroup, 3), hook.post_localSGD_hook)
    averager = averagers(implementation).PeriodicModelAverager(period=4, warmup_steps=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(8):
            x, y = batch(worker, step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            averager.average_parameters(model.parameters())
    except ValueError as error:
        return str(error)
    return "nothing was said"


@defect(torch_shows="nothing was said")
def test_d19_warm_ups_that_differ_are_named(implementation):
    for said in run_workers(_warm_up_mismatch, 2, (implementation,)):
        assert "warmup_steps=6" in said and "start_localSGD_iter=3" in said, said


def _no_subgroup(worker: int, implementation: str) -> bool:
    hook = post_local(implementation)
    state = hook.PostLocalSGDState(None, None, 1)
    made = state.subgroup is not None
    model = DDP(mlp())
    model.register_comm_hook(state, hook.post_localSGD_hook)
    for step in range(3):
        model.zero_grad()
        F.cross_entropy(model(batch(worker, step)[0]), batch(worker, step)[1]).backward()
    return made


@defect(torch_shows="raised:")
def test_d19_the_subgroup_is_made_with_the_state(implementation):
    assert run_workers(_no_subgroup, 2, (implementation,), timeout_s=20) == [True, True], "made in the backward pass"


def _copies(worker: int, implementation: str) -> dict[str, list[str]]:
    things = {
        "PeriodicModelAverager": averagers(implementation).PeriodicModelAverager(period=2),
        "HierarchicalModelAverager": hierarchical(implementation).HierarchicalModelAverager(
            OrderedDict([(2, 1), (4, 2)])
        ),
        "PostLocalSGDState": post_local(implementation).PostLocalSGDState(None, dist.new_group(), 3),
    }
    lacking: dict[str, list[str]] = {}
    for name, thing in things.items():
        counter = "iter" if hasattr(thing, "iter") else "step"
        setattr(thing, counter, 5)

        def from_state_dict(it: Any, counter: str = counter) -> Any:
            saved = it.state_dict()
            setattr(it, counter, 0)
            it.load_state_dict(saved)
            return it

        ways: dict[str, Callable[[Any], Any]] = {
            "state_dict": from_state_dict,
            "pickle": lambda it: pickle.loads(pickle.dumps(it)),  # noqa: S301
            "deepcopy": copy.deepcopy,
        }
        for way, made in ways.items():
            try:
                assert getattr(made(thing), counter) == 5
            except (AttributeError, TypeError, RuntimeError, pickle.PicklingError):
                lacking.setdefault(way, []).append(name)
    return lacking


@defect(torch_shows="(?s)cannot be kept: .*state_dict.*pickle.*deepcopy")
def test_d20_averagers_and_states_can_be_saved_and_copied(implementation):
    for lacking in run_workers(_copies, 2, (implementation,)):
        assert not lacking, f"cannot be kept: {lacking}"


def _as_an_optimizer(worker: int, implementation: str) -> dict[str, str]:
    """What a `torch.optim.Optimizer` can do and this one cannot, with the error."""

    def made() -> Any:
        torch.manual_seed(0)
        p = nn.Parameter(torch.ones(2))
        p.sum().backward()
        inner = torch.optim.SGD([p], lr=0.5, momentum=0.9)
        averager = averagers(implementation).PeriodicModelAverager(period=2)
        return module(implementation, "optim").PostLocalSGDOptimizer(inner, averager)

    def runs_hooks() -> None:
        optimizer, seen = made(), []
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
        optimizer.step()
        assert seen == [1]

    def takes_a_closure() -> None:
        assert made().step(lambda: 3.0) == 3.0

    def follows_the_learning_rate_after_loading() -> None:
        optimizer = made()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.param_groups[0]["lr"] = 0.0
        before = optimizer.optim.param_groups[0]["params"][0].detach().clone()
        optimizer.step()
        assert torch.equal(before, optimizer.optim.param_groups[0]["params"][0].detach())

    def works_with_one_cycle() -> None:
        optimizer = made()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
        for _ in range(3):
            optimizer.step()
            schedule.step()
        assert optimizer.optim.param_groups[0]["lr"] == schedule.get_last_lr()[0] < 0.1

    def copies() -> None:
        assert copy.deepcopy(made()).averager.step == 0

    def is_printed_and_pickled() -> None:
        assert pickle.loads(pickle.dumps(made())).averager.step == 0  # noqa: S301

    lacking = {}
    for check in (
        runs_hooks,
        takes_a_closure,
        follows_the_learning_rate_after_loading,
        works_with_one_cycle,
        copies,
        is_printed_and_pickled,
    ):
        try:
            check()
        except Exception as error:
            lacking[check.__name__] = f"{type(error).__name__}: {error}"
    return lacking


@defect(
    torch_shows="lacks .*runs_hooks.*takes_a_closure.*follows_the_learning_rate_after_loading.*works_with_one_cycle"
)
def test_d21_it_is_a_whole_optimizer(implementation):
    for lacking in run_workers(_as_an_optimizer, 2, (implementation,)):
        assert not lacking, f"lacks {lacking}"


def _one_worker_overflows(worker: int, implementation: str) -> tuple[Tensor, int, bool]:
    """Worker 1 overflows at step 3; weights are averaged every other step."""
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    averager = averagers(implementation).PeriodicModelAverager(period=2)
    optimizer = module(implementation, "optim").PostLocalSGDOptimizer(inner, averager)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=1000)
    skipped = False
    for step in range(9):
        x, y = batch(worker, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) * (float("inf") if worker == 1 and step == 3 else 1.0)
        before = weights(model)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped = skipped or torch.equal(before, weights(model))
    return weights(model), averager.step, skipped


@defect(torch_shows="did not end within|raised:|counted .9, 8.")
def test_d22_a_step_skipped_on_one_worker(implementation):
    results = run_workers(_one_worker_overflows, 2, (implementation,), timeout_s=20)
    steps = [step for _, step, _ in results]
    assert steps == [9, 9], f"counted {steps}"
    assert_equal_bits([found for found, _, _ in results])
    assert results[0][0].isfinite().all()
    assert [skipped for _, _, skipped in results] == [False, True]
