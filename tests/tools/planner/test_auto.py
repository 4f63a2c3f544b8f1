"""`auto()`: a plan that is chosen by measuring."""

from __future__ import annotations

import logging
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.tools.launch.links import link
from laconic.tools.planner.auto import MEASURED_STEPS, WARM_UP_STEPS, choice
from laconic.tools.planner.network import ComputedNetwork
from laconic.tools.planner.predict import PLANS, Forecast, Scenario
from laconic.tools.planner.shapes import from_count
from tests.workers import run_workers

STEPS = WARM_UP_STEPS + MEASURED_STEPS + 1


def test_the_text():
    assert laconic.plan("auto") == laconic.plan("auto()") == laconic.auto()
    assert repr(laconic.auto()) == "auto()"
    assert laconic.auto() != laconic.power_sgd()
    assert laconic.plan("auto(steps=300)") == laconic.auto(steps=300) != laconic.auto()
    with pytest.raises(ValueError, match=r"auto\(steps=0\): it must be the number of steps"):
        laconic.auto(steps=0)


def _forecast(rate: str, compute_s: float) -> Forecast:
    scenario = Scenario(from_count(10**6), 4, ComputedNetwork(link(rate, 4)), compute_s)
    return Forecast(PLANS, scenario)


def test_the_choice():
    fast, slow = _forecast("100gbit", 1.0), _forecast("50mbit", 0.2)
    assert choice(fast).plan == laconic.ddp()
    assert choice(slow) is slow.ranked[0] and choice(slow).plan != laconic.ddp()


def _train(worker: int, wrapped: bool) -> tuple[str, str, list[float], list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("laconic.tools.planner.auto").addHandler(handler)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
    model = DDP(net) if wrapped else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with laconic.attach(laconic.auto(steps=300), model, optimizer) as session:
        began = repr(session.plan)
        for step in range(STEPS + 2):
            torch.manual_seed(10 * step + worker)
            F.cross_entropy(model(torch.randn(8, 16)), torch.arange(8) % 4).backward()
            optimizer.step()
            optimizer.zero_grad()
        ended = repr(session.plan)
        session.average_weights()
    return began, ended, [p.sum().item() for p in net.parameters()], said


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.slow
def test_all_workers_choose_the_same(wrapped):
    (began, ended, weights, said), (_, other_ended, other_weights, other_said) = run_workers(_train, 2, (wrapped,))
    assert began == "auto(steps=300)" and not ended.startswith("auto")
    assert ended == other_ended and weights == other_weights
    assert not other_said and len(said) == 1
    assert f"All workers go on with {ended}." in said[0] and "overrules" in said[0]
    assert all(repr(plan) in said[0] for plan in PLANS[:2])
    assert "the training has 300 steps (auto(steps=...) says how many; sgd)" in said[0]


def _tiny(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(0)
    if name == "one number":
        return nn.Linear(1, 1, bias=False), (8, 1)
    if name == "no matrix":
        return nn.LayerNorm(8), (8, 8)
    if name == "bfloat16":
        return nn.Linear(8, 4, dtype=torch.bfloat16), (8, 8)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    net[0].requires_grad_(False)
    return net, (8, 8)


def _train_unevenly(worker: int, name: str) -> tuple[str, list[float]]:
    net, shape = _tiny(name)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)
    with laconic.attach("auto", net, optimizer) as session:
        for _ in range(STEPS + 2):
            time.sleep(0.02 * worker)  # one worker measures longer steps
            net(torch.randn(shape, dtype=next(net.parameters()).dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        chosen = repr(session.plan)
        session.average_weights()
    return chosen, [p.sum().item() for p in net.parameters()]


@pytest.mark.parametrize("name", ["one number", "no matrix", "bfloat16", "frozen"])
@pytest.mark.slow
def test_workers_of_unequal_speed_choose_the_same_for_a_tiny_model(name):
    first, second = run_workers(_train_unevenly, 2, (name,))
    assert first == second and first[0] != "auto()"


def test_one_worker_goes_on_without_a_choice(caplog):
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with laconic.attach("auto", net, optimizer) as session:
        for _ in range(STEPS + 2):
            net(torch.randn(2, 2)).sum().backward()
            optimizer.step()
        assert repr(session.plan) == "auto()" and "there is nothing to choose" in caplog.text


def _in_a_part(worker: int) -> str:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    net = nn.Linear(4, 4)
    try:
        laconic.attach(laconic.auto(), net, torch.optim.SGD(net.parameters(), lr=0.1), group=halves[worker // 2])
    except ValueError as error:
        return str(error)
    return ""


def test_a_part_of_the_workers_is_refused():
    assert "auto() measures among the 4 workers of the default process group" in run_workers(_in_a_part, 4)[0]
