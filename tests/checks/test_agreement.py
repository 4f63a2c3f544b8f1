"""Workers that do not mean the same thing get an error, all of them, before anything is averaged (F2 to F5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.session.models import batch, mlp, weights
from tests.workers import listen, run_workers


class Pair(nn.Module):
    def __init__(self, swapped: bool = False, width: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in ("b", "a") if swapped else ("a", "b"):
            setattr(self, name, nn.Parameter(torch.randn(4, width, dtype=dtype)))


def _attach_otherwise(worker: int, what: str) -> str:
    odd = worker == 2
    model = Pair(
        swapped=odd and what == "order",
        width=5 if odd and what == "shape" else 4,
        dtype=torch.float64 if odd and what == "dtype" else torch.float32,
    )
    if odd and what == "frozen":
        model.get_parameter("a").requires_grad_(False)
    if odd and what == "layout":
        model.get_parameter("a").data = model.get_parameter("a").data.t().contiguous().t()
    plan = laconic.power_sgd(rank=2 if odd and what == "plan" else 1, seed=int(odd and what == "seed"))
    if odd and what == "groups":
        plan = laconic.post_local_sgd(period=2, group=2)
    with pytest.raises(laconic.DisagreementError) as error:
        laconic.attach(plan, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("order", "worker 2 has parameter 0: b [4, 4] float32"),
        ("shape", "worker 2 has parameter 0: a [4, 5] float32"),
        ("dtype", "worker 2 has parameter 0: a [4, 4] float64"),
        ("frozen", "worker 2 has parameter 0: a [4, 4] float32 frozen"),
        ("layout", "worker 2 has parameter 0: a [4, 4] float32 strides (1, 4)"),
        ("plan", "worker 2 has plan: power_sgd(rank=2, bits=4)"),
        ("seed", "worker 2 has plan: power_sgd(rank=1, bits=4, seed=1)"),
        ("groups", "worker 2 has plan: post_local_sgd(period=2, group=2)"),
    ],
)
def test_a_worker_that_differs_is_named_on_all(what, said):
    results = run_workers(_attach_otherwise, 4, (what,))
    assert all(said in error for error in results), results[0]
    assert len(set(results)) == 1


def _start_apart(worker: int, wrapped: bool, sync: bool | None) -> tuple[float, str]:
    records = listen()
    module = mlp()
    model = DDP(module) if wrapped else module
    if worker == 1:
        with torch.no_grad():
            module.get_parameter("2.weight")[0, 0] += 1
    try:
        laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters(), lr=0.1), sync_initial=sync)
    except laconic.DisagreementError as error:
        records.append(str(error))
    return float(weights(module).sum()), " ".join(records)


@pytest.mark.parametrize("wrapped", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["ddp", "bare"])
def test_first_weights_that_differ_are_reported_or_mended(wrapped):
    for sync in (None, True, False):
        results = run_workers(_start_apart, 3, (wrapped, sync))
        mended = sync or (sync is None and not wrapped)
        assert (len({total for total, _ in results}) == 1) == mended
        for _, said in results:
            assert ("workers [1]" in said and "2.weight" in said) == (sync is not True)


@pytest.mark.parametrize(
    ("plan", "loaded", "alone"),
    [
        ("post_local_sgd(period=4)", 4, 3),  # weights and weights
        ("ddp()", 4, 0),  # gradients and gradients
        ("post_local_sgd(start=5, period=4)", 7, 0),  # weights, and gradients of the others
    ],
)
def test_workers_out_of_step_get_an_error_instead_of_a_mean(plan, loaded, alone):
    # One worker has loaded another checkpoint than the others: it comes to a round with them, but not to the same.
    results = run_workers(_loaded_elsewhere, 3, (plan, loaded, alone))
    expected = f"worker 1 at step {loaded + alone + 1} and the others at step {alone + 1}"
    assert all(expected in error for error in results), results


def _loaded_elsewhere(worker: int, plan: str, loaded: int, alone: int) -> str:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = laconic.attach(laconic.plan(plan), model, optimizer)
    state = session.state_dict()
    if worker == 1:
        session.load_state_dict(state | {"step": loaded})
    for step in range(alone):
        x, y = batch(worker, step)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with pytest.raises(laconic.DesyncError) as error:
        optimizer.step()
    return str(error.value)


def _changed_apart(worker: int) -> str:
    model = mlp()
    session = laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(laconic.DisagreementError) as error:
        session.change(laconic.power_sgd(rank=1 + worker % 2))
    return str(error.value)


def test_a_change_that_not_all_make_is_named():
    assert all("plan: power_sgd(rank=2, bits=4)" in error for error in run_workers(_changed_apart, 3))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "verify_every": ({"verify_every": True}, "attach(verify_every=True): it must be a whole number"),
    "commit": ({"commit": "now"}, "attach(commit='now'): weights are committed"),
    "anchors": ({"anchors": "gpu"}, "attach(anchors='gpu'): anchors are on"),
    "nonfinite": ({"nonfinite": "stop"}, "attach(nonfinite='stop'): it must be"),
    "timeout_s": ({"timeout_s": 0}, "attach(timeout_s=0): it must be a number of seconds"),
    "clip_norm": ({"clip_norm": -1.0}, "attach(clip_norm=-1.0): it must be a number above 0"),
    "sync_initial": ({"sync_initial": "yes"}, "attach(sync_initial='yes'): it must be True"),
    "plan": ({"plan": "ddp(rank=4)"}, "ddp(rank=4)"),
    "levels": ({"plan": "hierarchical_sgd({2: 4, 3: 8})"}, "the plan asks for groups of 4"),
}


def _refused_on_one(worker: int, name: str, wrapped: bool) -> list[str]:
    errors = []
    for odd in (False, True):  # the first refusal leaves the group usable
        module = mlp()
        model = DDP(module) if wrapped else module
        options: dict[str, Any] = {"plan": "ddp()"} | (REFUSED[name][0] if worker == odd else {})
        try:
            laconic.attach(options.pop("plan"), model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        except (laconic.DisagreementError, TypeError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_worker_refuses_is_an_error_on_all(name):
    text = REFUSED[name][1]
    results = run_workers(_refused_on_one, 2, (name, name == "verify_every"))
    for odd in (0, 1):
        own, other = results[odd][odd], results[1 - odd][odd]
        assert not own.startswith("DisagreementError") and text in own
        assert other.startswith("DisagreementError") and text in other and f"worker {odd} has refused: " in other


def _refused_on_all(worker: int) -> str:
    model = mlp()
    with pytest.raises(ValueError, match="verify_every=True") as error:
        laconic.attach("ddp()", model, torch.optim.SGD(model.parameters(), lr=0.1), verify_every=True)
    laconic.attach("ddp()", model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(error.value)


def test_what_all_workers_refuse_is_their_own_error():
    assert len(set(run_workers(_refused_on_all, 2))) == 1
