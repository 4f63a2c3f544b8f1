"""NaN and Inf on one worker (F1), and weights that part though they must not (F15)."""

from __future__ import annotations

import signal
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.checks.digests import digest
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import listen, run_workers

SICK, STEP = 1, 3


def _gradients(worker: int, text: str, wrapped: bool, policy: str) -> tuple[list[Tensor], str]:
    said = listen()
    module = mlp()
    model = DDP(module) if wrapped else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trace = [weights(module)]
    with laconic.attach(laconic.plan(text), model, optimizer, nonfinite=policy):  # type: ignore[arg-type]
        for step in range(1, 7):
            x, y = batch(worker, step)
            if worker == SICK and step == STEP:
                x[0, 0] = torch.inf
            F.cross_entropy(model(x), y).backward()
            try:
                optimizer.step()
            except laconic.NonFiniteError as error:
                said.append(f"{error} {error.workers}")
            optimizer.zero_grad()
            trace.append(weights(module))
    return trace, " ".join(said)


@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "bare"])
@pytest.mark.parametrize(
    "text",
    [
        "ddp()",
        "power_sgd(rank=1)",
        pytest.param("power_sgd(rank=2, bits=None)", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize(
    "policy", ["skip", *(pytest.param(each, marks=pytest.mark.slow) for each in ("exclude", "raise"))]
)
def test_one_bad_gradient(text, wrapped, policy):
    results = run_workers(_gradients, 3, (text, wrapped, policy))
    for step in range(7):
        assert_equal_bits([trace[step] for trace, _ in results])
    trace, said = results[0]
    assert all(each.isfinite().all() for each in trace)
    stood_still = torch.equal(trace[STEP], trace[STEP - 1])
    assert stood_still == (policy != "exclude")
    assert not torch.equal(trace[STEP + 1], trace[STEP]), "the next step is clean"
    if policy == "exclude":
        assert "33% of the workers had NaN or Inf, and were left out" in said
    else:
        assert f"step {STEP}: worker {SICK} had NaN or Inf, in 0.weight" in said
    if policy == "raise":
        assert f"[{SICK}]" in said


def _one_parameter(worker: int, text: str, wrapped: bool) -> tuple[str, bool]:
    """Let one worker's gradient of one parameter be NaN, neither the first nor the last."""
    said = listen()
    module = mlp()
    model = DDP(module) if wrapped else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if worker == SICK:
        module.get_parameter("2.weight").register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), torch.nan))
    before = weights(module)
    with laconic.attach(laconic.plan(text), model, optimizer):
        x, y = batch(worker, 1)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return " ".join(said), torch.equal(weights(module), before)


@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "bare"])
@pytest.mark.parametrize("text", ["ddp()", "power_sgd(rank=1)", "Plan(codec=Cast('bf16'))"])
def test_the_parameter_that_is_named_is_the_culprits_own(text, wrapped):
    for said, stood_still in run_workers(_one_parameter, 2, (text, wrapped)):
        assert f"worker {SICK} had NaN or Inf, in 2.weight. No worker steps" in said
        assert stood_still


def _late(worker: int, text: str, fused: bool, wrapped: bool) -> tuple[list[Tensor], list[str], list[int]]:
    """Let optimizers skip by themselves, as on a GPU; or, beside it, leave the spoiled step out altogether."""
    said = listen()
    module = mlp()
    model = DDP(module) if wrapped else module
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    trace, told = [], []
    with laconic.attach(laconic.plan(text), model, optimizer) as session:
        session._averager.check.late = fused
        for step in range(1, 7):
            x, y = batch(worker, step)
            if worker == SICK and step in (STEP, STEP + 2):
                x[0, 0] = torch.inf
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            assert getattr(optimizer, "found_inf", None) is None
            optimizer.zero_grad()
            trace.append(weights(module))
            told.append(len(said))
    return trace, said, told


@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "bare"])
@pytest.mark.parametrize(
    "text",
    ["ddp()", pytest.param("power_sgd(rank=2)", marks=pytest.mark.slow)],
)
def test_an_optimizer_that_skips_by_itself_is_not_waited_for(text, wrapped):
    late, at_once = (run_workers(_late, 3, (text, fused, wrapped)) for fused in (True, False))
    for (trace, said, told), (right, _, told_at_once) in zip(late, at_once, strict=True):
        assert all(torch.equal(*pair) for pair in zip(trace, right, strict=True))
        assert torch.equal(trace[STEP - 1], trace[STEP - 2]) and not torch.equal(trace[STEP], trace[STEP - 1])
        assert [told, told_at_once] == [[0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 2, 2]]
        for each, step in zip(said, (STEP, STEP + 2), strict=True):
            assert f"step {step}: worker {SICK} had NaN or Inf, in 0.weight. No worker has stepped" in each


def _skipping(worker: int, wrapped: bool, late: bool) -> tuple[list[Tensor], list[str]]:
    """Let the worker that sees its loss overflow skip the step, while the others call their optimizers."""
    said = listen()
    module = mlp()
    model = DDP(module) if wrapped else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    trace = []
    with laconic.attach(laconic.ddp(), model, optimizer) as session:
        session._averager.check.late = late
        session.stop_on(signal.SIGUSR1)
        for step in range(1, 7):
            x, y = batch(worker, step)
            if worker == SICK and step == STEP:
                x[0, 0] = torch.nan
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if loss.isfinite():
                optimizer.step()
            else:
                session.skip()
            optimizer.zero_grad()
            trace.append(weights(module))
    return trace, said


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "bare"])
def test_a_worker_may_skip_the_step_that_it_has_spoiled(wrapped, late):
    results = run_workers(_skipping, 3, (wrapped, late))
    for step in range(6):
        assert_equal_bits([trace[step] for trace, _ in results])
    for trace, said in results:
        assert [torch.equal(*pair) for pair in pairwise(trace)] == [False, True, False, False, False]
        assert len(said) == 1 and f"step {STEP}: worker {SICK} had NaN or Inf, in " in said[0]


def test_without_the_sick_worker_the_mean_is_that_of_the_others():
    (trace, _), *_ = run_workers(_gradients, 3, ("ddp()", True, "exclude"))
    alone = mlp()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(1, STEP + 1):
        losses = [
            F.cross_entropy(alone(x), y) for x, y in (batch(w, step) for w in range(3) if (w, step) != (SICK, STEP))
        ]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    torch.testing.assert_close(trace[STEP], weights(alone), rtol=1e-4, atol=1e-6)


def _sick_weights(worker: int, text: str, policy: str) -> tuple[list[Tensor], str]:
    said = listen()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trace = []
    with laconic.attach(laconic.plan(text), model, optimizer, nonfinite=policy):  # type: ignore[arg-type]
        for step in range(1, 9):
            x, y = batch(worker, step)
            if worker == SICK and step == STEP:
                x[0, 0] = torch.nan
            F.cross_entropy(model(x), y).backward()
            try:
                optimizer.step()
            except laconic.NonFiniteError as error:
                said.append(str(error))
                break
            optimizer.zero_grad()
            trace.append(weights(model))
    return trace, " ".join(said)


@pytest.mark.parametrize(
    "text",
    ["post_local_sgd(period=4)", "diloco(period=4)", "hierarchical_sgd({4: 3})"],
)
def test_a_worker_whose_weights_are_spoiled_adopts_those_of_the_others(text):
    results = run_workers(_sick_weights, 3, (text, "skip"))
    assert not results[SICK][0][STEP - 1].isfinite().all()
    for step in (4, 8):
        now = [trace[step - 1] for trace, _ in results]
        assert_equal_bits(now)
        assert now[0].isfinite().all()
    assert all(f"step 4, weights: worker {SICK} had NaN or Inf" in said for _, said in results)


def test_or_the_round_is_refused():
    results = run_workers(_sick_weights, 3, ("post_local_sgd(period=4)", "raise"))
    assert all(len(trace) == 3 and f"worker {SICK} had NaN or Inf" in said for trace, said in results)


def _flipped(worker: int, text: str, wrapped: bool) -> tuple[str, int]:
    module = mlp()
    model = DDP(module) if wrapped else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.plan(text), model, optimizer, verify_every=1) as session:
        for step in range(1, 12):
            if worker == 2 and step == 5:
                module.get_parameter("2.weight").data.view(torch.int32)[3, 4] ^= 1 << 7
            x, y = batch(worker, step)
            F.cross_entropy(model(x), y).backward()
            try:
                optimizer.step()
            except laconic.DivergedError as error:
                return f"{error} {error.workers}", session.step
            optimizer.zero_grad()
    return "nothing was noticed", 0


@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "bare"])
def test_a_bit_that_flips_in_memory_is_found_within_a_round(wrapped):
    for error, step in run_workers(_flipped, 4, ("ddp()", wrapped)):
        assert step == 5
        assert "after step 5, worker 2 holds other weights than the rest, first in 2.weight" in error
        assert error.endswith("[2]")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8], ids=str)
@pytest.mark.parametrize("size", [1, 3, 7, 8, 1000, 1024 * 2 + 5, 40_000])
def test_a_digest_changes_with_any_bit_and_any_two_that_trade_places(dtype, size):
    torch.manual_seed(size)
    t = torch.randint(-100, 100, (size,)).to(dtype)
    assert digest(t) == digest(t.clone())
    for _ in range(20):
        flipped = t.clone()
        place = int(torch.randint(0, flipped.view(torch.uint8).numel(), ()))
        flipped.view(torch.uint8)[place] ^= 1 << int(torch.randint(0, 8, ()))
        assert digest(flipped) != digest(t)
        i, j = torch.randint(0, size, (2,)).tolist()
        traded = t.clone()
        traded[i], traded[j] = t[j].clone(), t[i].clone()
        assert (digest(traded) == digest(t)) == torch.equal(traded, t)


def test_digests_of_odd_tensors():
    for t in (torch.empty(0), torch.tensor(1.5), torch.randn(4, 6).t(), torch.randn(9)[1:], torch.randn(5).half()[1:4]):
        assert digest(t) == digest(t.clone())
    assert digest(torch.zeros(3)) != digest(torch.zeros(4))


def _unknown() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"attach\(nonfinite='hope'\)"):
        laconic.attach(laconic.ddp(), model, optimizer, nonfinite="hope")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"attach\(verify_every=-1\)"):
        laconic.attach(laconic.ddp(), model, optimizer, verify_every=-1)


def test_unknown_policies_are_refused():
    _unknown()
