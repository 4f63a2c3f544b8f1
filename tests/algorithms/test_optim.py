"""`PostLocalSGDOptimizer` where programs use a `torch.optim.Optimizer`."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from laconic.algorithms.model_averaging.averagers import PeriodicModelAverager
from laconic.algorithms.optim import PostLocalSGDOptimizer
from tests.algorithms.implementations import saved_and_loaded, sgd, train
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import run_workers


def _created() -> tuple[nn.Module, PostLocalSGDOptimizer]:
    model = mlp()
    return model, PostLocalSGDOptimizer(sgd(model, lr=0.1, momentum=0.9), PeriodicModelAverager(period=3))


def _resumed(worker: int, folder: str) -> dict[str, bool]:
    whole, optimizer = _created()
    train(whole, optimizer, worker, range(25))
    half, half_optimizer = _created()
    train(half, half_optimizer, worker, range(5))
    results = {}

    saved = saved_and_loaded({"model": half.state_dict(), "optimizer": half_optimizer.state_dict()})
    assert saved["optimizer"]["step"] == 5
    model, optimizer = _created()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    train(model, optimizer, worker, range(5, 25))
    results["a state dict"] = torch.equal(weights(whole), weights(model))

    copied_model, copied = copy.deepcopy((half, half_optimizer))
    assert copied.averager.step == 5 and copied.optim is not half_optimizer.optim
    train(copied_model, copied, worker, range(5, 25))
    results["a deep copy"] = torch.equal(weights(whole), weights(copied_model))

    results["DCP"] = torch.equal(weights(whole), _through_dcp(worker, folder, half, half_optimizer))

    bare = sgd(model, lr=0.1, momentum=0.9)
    bare.load_state_dict(half_optimizer.state_dict())
    results["the wrapped optimizer alone"] = len(bare.state) == len(optimizer.state) > 0
    return results


def _through_dcp(worker: int, folder: str, half: nn.Module, half_optimizer: PostLocalSGDOptimizer) -> Tensor:
    """Each worker saves to its own folder: between averagings, weights and momentum differ."""
    path = Path(folder, str(worker))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns about a single process
        saved = {
            "model": half.state_dict(),
            "optimizer": get_optimizer_state_dict(half, half_optimizer),
            "averager": half_optimizer.averager.state_dict(),
        }
        state_dict_saver.save(saved, checkpoint_id=path, no_dist=True)
        model, optimizer = _created()
        loaded = {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "averager": optimizer.averager.state_dict(),
        }
        state_dict_loader.load(loaded, checkpoint_id=path, no_dist=True)
        model.load_state_dict(loaded["model"])
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
        optimizer.averager.load_state_dict(loaded["averager"])
    train(model, optimizer, worker, range(5, 25))
    return weights(model)


def test_resumed_runs_are_bit_identical(tmp_path):
    for results in run_workers(_resumed, 2, (str(tmp_path),)):
        wrong = [way for way, right in results.items() if not right]
        assert not wrong, f"the run resumed through {wrong} differs"


def _parts(worker: int) -> tuple[Tensor, Tensor, list[float]]:
    """Run the wrapper, with a schedule, a closure and step hooks, and then its parts one by one."""
    model, optimizer = _created()
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
    inner = sgd(by_hand, lr=0.1, momentum=0.9)
    averager = PeriodicModelAverager(period=3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(inner, max_lr=0.2, total_steps=12)
    for step in range(12):
        train(by_hand, inner, worker, [step], averager)
        if step < 11:
            schedule.step()
    return weights(model), weights(by_hand), losses


def test_the_wrapper_equals_its_parts():
    results = run_workers(_parts, 2)
    for wrapped, by_hand, losses in results:
        assert torch.equal(wrapped, by_hand)
        assert losses[-1] < losses[0]
    assert not torch.equal(results[0][0], results[1][0])  # step 12 is two steps after an averaging


def _groups(worker: int) -> Tensor:
    model, optimizer = _created()
    extra = nn.Parameter(torch.full((3,), float(worker)))
    optimizer.add_param_group({"params": [extra], "lr": 0.0})
    assert optimizer.param_groups is optimizer.optim.param_groups and len(optimizer.param_groups) == 2
    train(model, optimizer, worker, range(1))
    return extra.detach()


def test_an_added_group_is_averaged():
    assert_equal_bits([*run_workers(_groups, 2), torch.full((3,), 0.5)])


def _without_step(worker: int) -> None:
    _, optimizer = _created()
    optimizer.averager.step = 7
    with pytest.warns(UserWarning, match="does not contain a step counter for an averager"):
        optimizer.load_state_dict(optimizer.optim.state_dict())
    assert optimizer.averager.step == 0
    assert repr(optimizer) == repr(optimizer.optim)


def test_the_state_of_the_wrapped_optimizer_loads_with_a_warning():
    run_workers(_without_step, 1)
