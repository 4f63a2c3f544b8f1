"""Defects D19 to D22 of torch's post-local SGD: hook, states and optimizer. See `docs/twin.md`."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.algorithms.implementations import (
    averagers,
    defect,
    hierarchical,
    hooked,
    module,
    post_local,
    sgd,
    train,
)
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import run_workers


def _warm_up_mismatch(worker: int, implementation: str) -> str:
    hook = post_local(implementation)
    subgroup = dist.new_group([worker], use_local_synchronization=True)
    model = hooked(mlp(), hook.PostLocalSGDState(None, subgroup, 3), hook.post_localSGD_hook)
    averager = averagers(implementation).PeriodicModelAverager(period=4, warmup_steps=6)
    try:
        train(model, sgd(model), worker, range(8), averager)
    except ValueError as error:
        return str(error)
    return "no error"


@defect(torch_shows="no error")
def test_d19_different_warm_ups_raise(implementation):
    for message in run_workers(_warm_up_mismatch, 2, (implementation,)):
        assert "warmup_steps=6" in message and "start_localSGD_iter=3" in message, message


def _no_subgroup(worker: int, implementation: str) -> bool:
    hook = post_local(implementation)
    state = hook.PostLocalSGDState(None, None, 1)
    created = state.subgroup is not None
    train(hooked(mlp(), state, hook.post_localSGD_hook), None, worker, range(3))
    return created


@defect(torch_shows="raised:")
def test_d19_the_constructor_creates_the_subgroup(implementation):
    assert run_workers(_no_subgroup, 2, (implementation,), timeout_s=20) == [True, True]


def _copies(worker: int, implementation: str) -> dict[str, list[str]]:
    objects = {
        "PeriodicModelAverager": averagers(implementation).PeriodicModelAverager(period=2),
        "HierarchicalModelAverager": hierarchical(implementation).HierarchicalModelAverager(
            OrderedDict([(2, 1), (4, 2)])
        ),
        "PostLocalSGDState": post_local(implementation).PostLocalSGDState(None, dist.new_group(), 3),
    }
    failed: dict[str, list[str]] = {}
    for name, each in objects.items():
        counter = "iter" if hasattr(each, "iter") else "step"
        setattr(each, counter, 5)

        def from_state_dict(saved: Any, counter: str = counter) -> Any:
            state_dict = saved.state_dict()
            setattr(saved, counter, 0)
            saved.load_state_dict(state_dict)
            return saved

        ways: dict[str, Callable[[Any], Any]] = {
            "state_dict": from_state_dict,
            "pickle": lambda saved: pickle.loads(pickle.dumps(saved)),  # noqa: S301
            "deepcopy": copy.deepcopy,
        }
        for way, copied in ways.items():
            try:
                assert getattr(copied(each), counter) == 5
            except (AttributeError, TypeError, RuntimeError, pickle.PicklingError):
                failed.setdefault(way, []).append(name)
    return failed


@defect(torch_shows="(?s)not supported: .*state_dict.*pickle.*deepcopy")
def test_d20_averagers_and_states_can_be_saved_and_copied(implementation):
    for failed in run_workers(_copies, 2, (implementation,)):
        assert not failed, f"not supported: {failed}"


def _unsupported(worker: int, implementation: str) -> dict[str, str]:
    """Return the features of `torch.optim.Optimizer` that fail, with the error of each."""

    def create() -> Any:
        torch.manual_seed(0)
        p = nn.Parameter(torch.ones(2))
        p.sum().backward()
        inner = torch.optim.SGD([p], lr=0.5, momentum=0.9)
        averager = averagers(implementation).PeriodicModelAverager(period=2)
        return module(implementation, "optim").PostLocalSGDOptimizer(inner, averager)

    def runs_hooks() -> None:
        optimizer, seen = create(), []
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
        optimizer.step()
        assert seen == [1]

    def takes_a_closure() -> None:
        assert create().step(lambda: 3.0) == 3.0

    def follows_the_lr_after_loading() -> None:
        optimizer = create()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.param_groups[0]["lr"] = 0.0
        before = optimizer.optim.param_groups[0]["params"][0].detach().clone()
        optimizer.step()
        assert torch.equal(before, optimizer.optim.param_groups[0]["params"][0].detach())

    def works_with_one_cycle() -> None:
        optimizer = create()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
        for _ in range(3):
            optimizer.step()
            schedule.step()
        assert optimizer.optim.param_groups[0]["lr"] == schedule.get_last_lr()[0] < 0.1

    def can_be_copied() -> None:
        assert copy.deepcopy(create()).averager.step == 0

    def can_be_pickled() -> None:
        assert pickle.loads(pickle.dumps(create())).averager.step == 0  # noqa: S301

    failed = {}
    for check in (
        runs_hooks,
        takes_a_closure,
        follows_the_lr_after_loading,
        works_with_one_cycle,
        can_be_copied,
        can_be_pickled,
    ):
        try:
            check()
        except Exception as error:
            failed[check.__name__] = f"{type(error).__name__}: {error}"
    return failed


@defect(torch_shows="not supported: .*runs_hooks.*takes_a_closure.*follows_the_lr_after_loading.*works_with_one_cycle")
def test_d21_all_features_of_an_optimizer(implementation):
    for failed in run_workers(_unsupported, 2, (implementation,)):
        assert not failed, f"not supported: {failed}"


def _one_worker_overflows(worker: int, implementation: str) -> tuple[Tensor, int, bool]:
    """Worker 1 overflows at step 3; weights are averaged every other step."""
    model = mlp()
    averager = averagers(implementation).PeriodicModelAverager(period=2)
    optimizer = module(implementation, "optim").PostLocalSGDOptimizer(sgd(model, momentum=0.9), averager)
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
    assert steps == [9, 9], f"counted {steps} steps"
    assert_equal_bits([found for found, _, _ in results])
    assert results[0][0].isfinite().all()
    assert [skipped for _, _, skipped in results] == [False, True]
