"""A worker that dies (F6) or stands still (F7): the others are told who, at once, and have lost nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.elastic.survivors import die, run_survivors, stand_still
from tests.session.models import batch, mlp, weights

LOST, AT = 2, 8
SOONER = [
    ("ddp()", "dies in it", True),
    ("ddp()", "stands still", False),
    ("power_sgd(rank=2)", "stands still", True),
    ("post_local_sgd(period=4)", "dies", False),
    ("post_local_sgd(period=4)", "dies", True),
]
"""What is tried at every change, the first of them always; the rest at night."""


def _when(*case: object) -> list[pytest.MarkDecorator]:
    return [] if case in SOONER[:2] else [pytest.mark.slow] if case in SOONER else [pytest.mark.nightly]


def _until_lost(
    worker: int, text: str, wrapped: bool, how: str, options: dict[str, Any], lost: int = LOST, norm: bool = False
) -> tuple[str, list[int], float, Tensor, Tensor]:
    module = nn.Sequential(nn.BatchNorm1d(64), mlp(width=64)) if norm else mlp(width=64)
    model = DDP(module) if wrapped else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepped: list[Tensor] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(weights(module)))  # runs before the round
    laconic.attach(laconic.plan(text), model, optimizer, timeout_s=2, **options)
    for step in range(1, 50):
        if worker == lost and step == AT:
            {"dies": die, "stands still": stand_still, "dies in it": _die_in_the_round}.get(how, int)()
        x, y = batch(worker, step, width=64)
        F.cross_entropy(model(x), y).backward()
        stepped[:] = [weights(module)]
        begun = time.monotonic()
        try:
            optimizer.step()
        except laconic.LostWorkerError as error:
            return str(error), error.missing, time.monotonic() - begun, stepped[-1], weights(module)
        optimizer.zero_grad()
    raise AssertionError("nobody was lost")


def _die_in_the_round() -> None:
    """Die when the large collective is due, and a little later: the header has gone through, the others are in it."""

    def late() -> None:
        time.sleep(0.5)
        die()

    _when_the_large_collective_is_due(late)


def _when_the_large_collective_is_due(act: Callable[[], None]) -> None:
    """Act before the first collective that is larger than a header, whichever torch function starts it."""
    for name, place in (("all_reduce", 0), ("all_to_all_single", 1)):
        setattr(dist, name, _acting(getattr(dist, name), place, act))


def _acting(collective: Callable[..., Any], place: int, act: Callable[[], None]) -> Callable[..., Any]:
    def acting(*args: Any, **kwargs: Any) -> Any:
        if args[place].nbytes > 400:
            act()
        return collective(*args, **kwargs)

    return acting


@pytest.mark.parametrize(
    ("text", "how", "wrapped"),
    [
        pytest.param(text, how, wrapped, marks=_when(text, how, wrapped))
        for text in ("ddp()", "power_sgd(rank=2)", "post_local_sgd(period=4)")
        for how in ("dies", "dies in it", "stands still")
        for wrapped in (True, False)
    ],
)
def test_survivors_are_told_who_is_missing(text, how, wrapped):
    results = run_survivors(_until_lost, 4, LOST, (text, wrapped, how, {}))
    for said, missing, _, before, after in results.values():
        assert missing == [LOST], said
        assert f"step {AT}," in said
        assert f"worker {LOST} did not respond" in said
        if "local" not in text:  # gradients: the optimizer has not stepped
            assert torch.equal(before, after)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("how", ["dies", "stands still"])
def test_with_batch_norm_under_ddp_too(how, lost):
    """DDP's own broadcast of buffers would wait without end, or raise gloo's error."""
    results = run_survivors(_until_lost, 3, lost, ("ddp()", True, how, {}, lost, True))
    for said, missing, *_ in results.values():
        assert missing == [lost], said
        assert f"worker {lost} did not respond" in said


@pytest.mark.parametrize("workers", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["dies in it", pytest.param("dies", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "text",
    [
        "post_local_sgd(period=4)",
        pytest.param("diloco(period=4)", marks=pytest.mark.slow),
        pytest.param("diloco(period=4, codec=Cast('bf16'))", marks=pytest.mark.slow),
    ],
)
def test_an_atomic_round_leaves_the_weights_as_they_were_before_it(text, how, workers):
    results = run_survivors(_until_lost, workers, LOST, (text, False, how, {"commit": "atomic"}))
    heads = [said.partition(":")[0] for said, *_ in results.values()]
    assert all(f"step {AT}, control" in head for head in heads) == (how == "dies"), heads  # the header, or after it
    for _, missing, _, before, after in results.values():
        assert missing == [LOST]
        assert torch.equal(before, after)


def _cancelled(worker: int) -> str:
    module = mlp(width=600)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    session = laconic.attach(laconic.post_local_sgd(period=2), module, optimizer, timeout_s=50)
    for step in range(1, 5):
        x, y = batch(worker, step, width=600)
        F.cross_entropy(module(x), y).backward()
        if step == 4:
            if worker == LOST:
                _when_the_large_collective_is_due(stand_still)
            threading.Timer(2, session.cancel_wait).start()
        try:
            optimizer.step()
        except laconic.LostWorkerError as error:
            return str(error)
    raise AssertionError("nobody was lost")


def test_a_wait_can_be_cancelled():
    for said in run_survivors(_cancelled, 3, LOST).values():
        assert "weights among 3 workers" in said and "was abandoned" in said  # a timeout says otherwise
