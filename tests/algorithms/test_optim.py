"""`PostLocalSGDOptimizer` in the places where a `torch.optim.Optimizer` is used."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from laconic.algorithms.model_averaging.averagers import PeriodicModelAverager
from laconic.algorithms.optim import PostLocalSGDOptimizer
from tests.algorithms.implementations import saved_and_loaded
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import run_workers


def _made(momentum: float = 0.9) -> tuple[nn.Module, PostLocalSGDOptimizer]:
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    return model, PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=3))


def _train(model: nn.Module, optimizer: Any, worker: int, steps: range) -> None:
    for step in steps:
        x, y = batch(worker, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def _resumed(worker: int, folder: str) -> dict[str, bool]:
    whole, optimizer = _made()
    _train(whole, optimizer, worker, range(25))
    half, half_optimizer = _made()
    _train(half, half_optimizer, worker, range(5))
    results = {}

    saved = saved_and_loaded({"model": half.state_dict(), "optimizer": half_optimizer.state_dict()})
    assert saved["optimizer"]["step"] == 5
    model, optimizer = _made()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    _train(model, optimizer, worker, range(5, 25))
    results["a state dict"] = torch.equal(weights(whole), weights(model))

    copied_model, copied = copy.deepcopy((half, half_optimizer))
    assert copied.averager.step == 5 and copied.optim is not half_optimizer.optim
    _train(copied_model, copied, worker, range(5, 25))
    results["a deep copy"] = torch.equal(weights(whole), weights(copied_model))

    results["DCP"] = torch.equal(weights(whole), _through_dcp(worker, folder, half, half_optimizer))

    bare = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    bare.load_state_dict(half_optimizer.state_dict())
    results["a bare optimizer loads it"] = len(bare.state) == len(optimizer.state) > 0
    return results


def _through_dcp(worker: int, folder: str, half: nn.Module, half_optimizer: PostLocalSGDOptimizer) -> Tensor:
    """Each worker its own folder: between rounds, weights and momentum differ."""
    path = Path(folder, str(worker))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP speaks of worlds of one
        saved = {
            "model": half.state_dict(),
            "optimizer": get_optimizer_state_dict(half, half_optimizer),
            "averager": half_optimizer.averager.state_dict(),
        }
        state_dict_saver.save(saved, checkpoint_id=path, no_dist=True)
        model, optimizer = _made()
        loaded = {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "averager": optimizer.averager.state_dict(),
        }
        state_dict_loader.load(loaded, checkpoint_id=path, no_dist=True)
        model.load_state_dict(loaded["model"])
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
        optimizer.averager.load_state_dict(loaded["averager"])
    _train(model, optimizer, worker, range(5, 25))
    return weights(model)


def test_resumed_runs_are_bit_identical(tmp_path):
    for results in run_workers(_resumed, 2, (str(tmp_path),)):
        wrong = [way for way, right in results.items() if not right]
        assert not wrong, f"resumed through {wrong}: another run"


def _as_by_hand(worker: int) -> tuple[Tensor, Tensor, list[float]]:
    """The wrapped optimizer against its parts, with a schedule, a closure and step hooks."""
    model, optimizer = _made()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=12)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    losses = []
    for step in range(12):
        x, y = batch(worker, step)

        def closure(x: Tensor = x, y: Tensor = y) -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return float(loss.detach())

        loss = optimizer.step(closure)
        assert loss is not None
        losses.append(loss)
        if step < 11:
            schedule.step()
    assert seen == ["before", "after"] * 12

    by_hand = mlp()
    inner = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    averager = PeriodicModelAverager(period=3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(inner, max_lr=0.2, total_steps=12)
    for step in range(12):
        _train(by_hand, inner, worker, range(step, step + 1))
        averager.average_parameters(by_hand.named_parameters())
        if step < 11:
            schedule.step()
    return weights(model), weights(by_hand), losses


def test_it_does_what_its_parts_do():
    results = run_workers(_as_by_hand, 2)
    for wrapped, by_hand, losses in results:
        assert torch.equal(wrapped, by_hand)
        assert losses[-1] < losses[0]
    assert not torch.equal(results[0][0], results[1][0])  # step 12 is two steps after a round


def _groups(worker: int) -> Tensor:
    model, optimizer = _made()
    extra = nn.Parameter(torch.full((3,), float(worker)))
    optimizer.add_param_group({"params": [extra], "lr": 0.0})
    assert optimizer.param_groups is optimizer.optim.param_groups and len(optimizer.param_groups) == 2
    _train(model, optimizer, worker, range(1))
    return extra.detach()


def test_a_group_that_is_added_is_averaged():
    assert_equal_bits([*run_workers(_groups, 2), torch.full((3,), 0.5)])


def _without_step(worker: int) -> None:
    _, optimizer = _made()
    optimizer.averager.step = 7
    with pytest.warns(UserWarning, match="does not contain a step counter for an averager"):
        optimizer.load_state_dict(optimizer.optim.state_dict())
    assert optimizer.averager.step == 0
    assert repr(optimizer) == repr(optimizer.optim)


def test_a_bare_optimizers_state_is_taken_with_a_warning():
    run_workers(_without_step, 1)
