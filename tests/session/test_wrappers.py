"""Models and optimizers inside wrappers: found, or refused with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.session.foreign import optimizer_inside
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import WorkerError, listen, run_workers


class HidesDDP(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def _attach_to(worker: int, hide: str) -> None:
    model = mlp()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    laconic.attach(laconic.ddp(), HidesDDP(ddp) if hide == "inside" else model, optimizer)


def test_an_unknown_wrapper_that_hides_ddp_is_refused_by_name():
    with pytest.raises(WorkerError, match=r"attach: HidesDDP hides .* attach\(plan, model\.inner, optimizer\)"):
        run_workers(_attach_to, 1, ("inside",))
    with pytest.raises(WorkerError, match=r"holds the parameters of this Sequential.* trainer\.model_wrapped"):
        run_workers(_attach_to, 1, ("outside",))


class _FabricModule(nn.Module):
    """Stands for the one of Lightning Fabric, whose class has this name."""

    def __init__(self, forward_module: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward_module

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_module(x)  # type: ignore[no-any-return]


class _Proxy:
    """Passes steps on, as the wrappers of Lightning do: it has the class of what it wraps, and none of its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Proxy", (_Proxy, type(optimizer)), {})

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def _wrapped(worker: int, wrap: bool, text: str) -> tuple[Tensor, int]:
    model: nn.Module = DistributedDataParallel(mlp())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if wrap:
        model, optimizer = _FabricModule(torch.compile(model, backend="eager")), _Proxy(optimizer)  # type: ignore[arg-type]
    session = laconic.attach(laconic.plan(text), model, optimizer)
    for step in range(4):
        x, y = batch(worker, step)
        F.cross_entropy(model(x), y).backward()
        session.average_gradients(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert session.step == 4
    assert next(iter(session.parameters)) == "0.weight"
    return weights(model), session.ledger.wire_bytes


@pytest.mark.parametrize("text", ["power_sgd(rank=2)", "diloco(period=2)"])
def test_known_wrappers_are_looked_through(text: str):
    plain, wrapped = (run_workers(_wrapped, 2, (wrap, text)) for wrap in (False, True))
    assert_equal_bits([result[0] for result in (*plain, *wrapped)])
    assert [sent for _, sent in plain] == [sent for _, sent in wrapped]


def test_which_optimizer_is_inside():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert optimizer_inside(optimizer) is optimizer
    assert optimizer_inside(_Proxy(optimizer)) is optimizer
    assert optimizer_inside(ScheduleFreeWrapper(_Proxy(optimizer))) is optimizer  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # holds the optimizer, and is none
    assert optimizer_inside(scheduler) is scheduler
    with pytest.raises(TypeError, match=r"not StepLR\. Schedulers are not attached"):
        laconic.attach(laconic.ddp(), model, scheduler)  # type: ignore[arg-type]


class NoInit(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params)}]


def test_an_optimizer_without_hooks_is_refused():
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"NoInit has not run torch\.optim\.Optimizer\.__init__"):
        laconic.attach(laconic.ddp(), model, NoInit(model.parameters()))


class ScheduleFreeWrapper:
    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.param_groups = base.param_groups


def test_a_wrapper_that_moves_weights_needs_averaged_gradients():
    model = nn.Linear(2, 1)
    wrapper: Any = ScheduleFreeWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"diloco\(.*ScheduleFreeWrapper\): this wrapper changes the weights after"):
        laconic.attach(laconic.diloco(), model, wrapper)
    laconic.attach(laconic.power_sgd(), model, wrapper).detach()


class DeepSpeedEngine(nn.Linear):
    pass


def test_a_wrapper_that_averages_by_itself_is_refused():
    model = nn.Sequential(DeepSpeedEngine(2, 1))
    with pytest.raises(ValueError, match=r"DeepSpeedEngine averages gradients itself.* Train a DDP model"):
        laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters(), lr=0.1))


def _adds_a_group(worker: int, text: str, who: tuple[int, ...]) -> Tensor:
    model = mlp()
    layers = list(model.children())
    optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.1)
    laconic.attach(laconic.plan(text), model, optimizer)
    for step in range(6):
        if step == 2 and worker in who:
            optimizer.add_param_group({"params": list(layers[2].parameters()), "lr": 0.05})
        x, y = batch(worker, step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.zero_grad()
    assert not torch.equal(weights(layers[2]), weights(mlp()[2]))
    return weights(model)


@pytest.mark.parametrize("text", ["power_sgd(rank=2)", "post_local_sgd(period=2)"])
def test_a_group_that_is_added_later_is_averaged(text: str):
    assert_equal_bits(run_workers(_adds_a_group, 2, (text, (0, 1))))


@pytest.mark.parametrize("text", ["ddp()", "post_local_sgd(period=2)"])
def test_a_group_that_one_worker_adds_is_refused(text: str):
    with pytest.raises(WorkerError, match=r"optimizer 0: SGD of 0\.weight, 0\.bias, 2\.weight, 2\.bias"):
        run_workers(_adds_a_group, 2, (text, (1,)))


def test_parameters_that_are_not_the_models():
    said = listen()
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.ddp(), model, optimizer):
        optimizer.add_param_group({"params": list(other.parameters())})
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert ["holds 2 parameters that are not the model's" in text for text in said] == [True]
