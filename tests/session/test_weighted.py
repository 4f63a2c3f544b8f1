"""Weighted means: `session.weigh(n)` weighs each worker by what it has counted."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic import checkpoint
from laconic.algorithms.ddp_comm_hooks.powerSGD_hook import Batched
from laconic.codecs import Codec, ErrorFeedback
from laconic.codecs.feedback import residuals_by_name
from laconic.comm.collectives import mean, weighted_mean
from laconic.comm.lockstep import exact_mean, lockstep
from laconic.exchange import Averaged, Exchange, Mean, Peers
from laconic.plans.schedules import Payload
from laconic.session.gradients import by_share
from laconic.session.step_headers import Counts
from laconic.tools.simulate.in_process import gloo_mean
from tests.laws.codecs import CODECS, FEEDBACK, FEW_BITS, TENSOR_BY_TENSOR, assert_close, each, rounding, subtracts
from tests.laws.world import World, carried, residuals, same_bits, side_by_side
from tests.session.models import assert_equal_bits, mlp, weights
from tests.session.sharding import net, sharded, two_by_two
from tests.workers import WorkerError, listen, run_workers

SIZES = (8, 8, 8, 32)


# Unequal batches beside one process that has all samples


def _samples(step: int, count: int = sum(SIZES)) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(step))
    return x, torch.tanh(x[:, :1] - 2 * x[:, 1:2])


def _own(worker: int, step: int, sizes: Sequence[int] = SIZES) -> tuple[Tensor, Tensor]:
    x, y = _samples(step, sum(sizes))
    return x.split(list(sizes))[worker], y.split(list(sizes))[worker]


def _unequal(worker: int, kind: str, weighted: bool, steps: int) -> Tensor:
    model: nn.Module
    sizes: Sequence[int] = SIZES
    if kind == "fsdp":  # torch averages the workers of a replica equally: 8 and 8 samples, 32 and 32
        model, sizes = sharded(two_by_two()), (8, 8, 32, 32)
    else:
        model = DDP(net(), bucket_cap_mb=0.002) if kind == "ddp" else net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with laconic.attach(laconic.ddp(), model, optimizer, weighted=weighted) as session:
        for step in range(steps):
            x, y = _own(worker, step, sizes)
            if weighted:
                session.weigh(len(x))
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([getattr(p, "full_tensor", lambda p=p: p)().detach().reshape(-1) for p in model.parameters()])


def _one_process(steps: int, sizes: Sequence[int] = SIZES) -> Tensor:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        x, y = _samples(step, sum(sizes))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("kind", ["ddp", "bare", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_unequal_batches_train_as_one_process_with_all_samples(kind):
    steps = 20
    one = _one_process(steps, (8, 8, 32, 32) if kind == "fsdp" else SIZES)
    weighted = run_workers(_unequal, 4, (kind, True, steps))
    assert_equal_bits(weighted)
    plain = run_workers(_unequal, 4, (kind, False, steps))[0]
    off, biased = (float((w - one).norm() / one.norm()) for w in (weighted[0], plain))
    assert off < 1e-6 < 1e-3 < biased


def _with_accumulation(worker: int, kind: str) -> Tensor:
    """Micro-batches of 8 samples: one of them on three workers, four on the last."""
    module = net()
    model = DDP(module) if kind == "ddp" else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with laconic.attach(laconic.ddp(), model, optimizer, weighted=True, clip_norm=0.5) as session:
        for step in range(6):
            x, y = _own(worker, step)
            for index, (a, b) in enumerate(zip(x.split(8), y.split(8), strict=True)):
                session.weigh(len(a))
                last = index == len(x) // 8 - 1
                with contextlib.nullcontext() if last or kind == "bare" else model.no_sync():  # type: ignore[operator]
                    loss = (
                        F.mse_loss(model(a), b) * len(a) / len(x)
                    )  # they add up to the mean over this worker's samples
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(module)


@pytest.mark.parametrize("kind", ["ddp", "bare"])
def test_accumulated_micro_batches_count_together(kind):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        x, y = _samples(step)
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(run_workers(_with_accumulation, 4, (kind,))[2], weights(model), rtol=1e-5, atol=1e-6)


def _some_plans(worker: int, texts: list[str], weighted: bool) -> list[Any]:
    found = []
    for text in texts:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with laconic.attach(laconic.plan(text), model, optimizer, weighted=weighted) as session:
            for step in range(9):
                if weighted:
                    session.weigh(5)
                x, y = _own(worker, step)
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            state = session.state_dict()
            found.append([weights(model), state["state"], state["anchor"] or {}])
    return found


@pytest.mark.slow
def test_equal_counts_change_no_bit():
    texts = [
        "ddp()",
        "power_sgd(rank=1)",
        "post_local_sgd(start=3, period=2)",
        "diloco(period=3)",
        "streaming_diloco(period=4, fragments=2, delay=1)",
        "Plan(schedule=Every(2), codec=ErrorFeedback(Quantized(2)), topology=Groups(2))",
    ]
    weighted, plain = (run_workers(_some_plans, 4, (texts, each)) for each in (True, False))
    for ours, theirs in zip(weighted, plain, strict=True):
        for text, (bits, state, anchor), (others, other_state, other_anchor) in zip(texts, ours, theirs, strict=True):
            assert torch.equal(bits, others), text
            assert same_bits(state, other_state), text
            assert same_bits(anchor, other_anchor), text


# The law: what is delivered plus what residuals keep is the weighted truth

COUNTS = ((5,), (3, 9), (4, 0, 7), (8, 8, 8, 32))


def _shares(counts: Sequence[int]) -> list[float]:
    return [n * len(counts) / sum(counts) for n in counts]


def _average(world: World, inputs: Sequence[dict[str, Tensor]], shares: Sequence[float]) -> list[Averaged]:
    """Average as a session does, in the memory of the inputs."""
    exchanges = []
    for rank, (given, state) in enumerate(zip(inputs, world.states, strict=True)):
        average = world.codec.average(given, state, Peers(rank, world.workers), reuse=world.reuse)
        exchanges.append(average if shares[rank] == 1 else by_share(given, shares[rank], state, average))
    return lockstep(exchanges, world.ledger)


WORLDS = [(2, torch.float16), (2, torch.bfloat16), (3, torch.float64), (4, torch.float32)]
each_world = pytest.mark.parametrize(("workers", "dtype"), WORLDS, ids=lambda x: str(x).removeprefix("torch."))


@each([codec for codec in FEEDBACK if not isinstance(codec, Batched)])  # the twin's alone
@each_world
def test_delivered_plus_residual_is_the_weighted_truth(codec: Codec, workers: int, dtype: torch.dtype) -> None:
    world, shares = World(codec, workers), _shares(COUNTS[workers - 1])
    names = carried(codec)
    sent: list[dict[str, Any]] = [dict.fromkeys(names, 0.0) for _ in range(workers)]
    truth: list[dict[str, Any]] = [dict.fromkeys(names, 0.0) for _ in range(workers)]
    size: dict[str, Any] = dict.fromkeys(names, 0.0)
    forgets = 1 - getattr(codec, "decay", 1.0)
    for step in range(8):
        for worker, state in enumerate(world.states if forgets else []):
            for name, residual in residuals(state).items():
                truth[worker][name] -= forgets * residual.double()
        inputs = [side_by_side(given) for given in world.inputs(step, dtype)]
        for worker, given in enumerate(inputs):
            for name, t in given.items():
                truth[worker][name] += shares[worker] * t.double()
                size[name] += shares[worker] * t.double().abs()
        for worker, end in enumerate(_average(world, inputs, shares)):
            subtracted = end.mean if subtracts(codec) == "mean" else end.own()
            for name, t in subtracted.items():
                sent[worker][name] += t.double()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for worker, state in enumerate(world.states):
        by_name = residuals(state)
        assert "square.weight" in by_name
        everything = torch.cat([torch.as_tensor(size[name]).reshape(-1) for name in names])
        for name, residual in by_name.items():
            scale = size[name] if codec in TENSOR_BY_TENSOR else everything
            relative = (64 if codec in FEW_BITS else 8) * torch.finfo(wide).eps
            assert_close(sent[worker][name] + residual, truth[worker][name], relative, scale)


@each(CODECS)
@each_world
def test_every_worker_ends_with_the_same_bits_and_codecs_without_loss_with_the_weighted_mean(
    codec: Codec, workers: int, dtype: torch.dtype
) -> None:
    world, counts = World(codec, workers), COUNTS[workers - 1]
    inputs = [side_by_side(given) for given in world.inputs("once", dtype)]
    counted = [(n, given) for n, given in zip(counts, inputs, strict=True) if n]
    scale = {name: torch.stack([given[name].clone() for _, given in counted]) for name in inputs[0]}
    truth = {name: _mean_of(scale[name].double().unbind(), [n for n, _ in counted]) for name in inputs[0]}
    for n, given in zip(counts, inputs, strict=True):
        for t in given.values() if n == 0 else ():
            t.fill_(torch.nan)  # whatever a worker holds that has counted nothing
    ends = _average(world, inputs, _shares(counts))
    for end in ends:
        assert same_bits(end.mean, ends[0].mean)
        assert bool(end.finite())
    if codec in TENSOR_BY_TENSOR and codec not in FEW_BITS and "LowRank" not in repr(codec):
        for name, exact in truth.items():
            assert_close(ends[0].mean[name], exact, 4 * max(_shares(counts)) * rounding(codec, dtype), scale[name])


def test_a_product_beyond_fp16_goes_to_the_residual():
    codec = ErrorFeedback(laconic.Quantized(8))
    world = World(codec, 2)
    sent = [torch.zeros(4, 4, dtype=torch.float64) for _ in range(2)]
    for _ in range(40):
        inputs = [{"w": torch.full((4, 4), value, dtype=torch.float16)} for value in (100.0, 40_000.0)]
        for amount, end in zip(sent, _average(world, inputs, _shares((1, 19))), strict=True):
            assert bool(end.mean["w"].isfinite().all())
            amount += end.own()["w"].double()
    for value, amount, state in zip((0.1 * 100, 1.9 * 40_000), sent, world.states, strict=True):
        whole = torch.full((4, 4), 40 * value, dtype=torch.float64)
        torch.testing.assert_close(amount + residuals(state)["w"].double(), whole, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_weighted_means_of_equal_rows_are_these_rows(dtype):
    generator = torch.Generator().manual_seed(0)
    row = torch.cat([torch.randn(500, generator=generator) * 10.0**scale for scale in (-6, 0, 4)]).to(dtype)
    row[0], row[1] = -0.0, torch.finfo(dtype).max
    for counts in ((1, 2, 3), (8, 8, 8, 32), (0, 5), (1, 10**9)):
        got = weighted_mean([row] * len(counts), _shares(counts)).to(dtype)
        assert same_bits({"": got}, {"": row})
    rows = [torch.randn(1000, generator=generator).to(dtype) for _ in range(3)]
    exact = _mean_of([row.double() for row in rows], (1, 2, 3))
    assert_close(weighted_mean(rows, _shares((1, 2, 3))).to(dtype), exact, torch.finfo(dtype).eps)
    assert_close(weighted_mean(rows, [1.0] * 3).to(dtype), mean(rows).to(dtype), torch.finfo(dtype).eps)
    outlier = [torch.tensor([each], dtype=dtype) for each in (3e4, 1.0, 1.0)]  # of next to no share
    exact = _mean_of([row.double() for row in outlier], (1, 10**6, 10**6))
    assert_close(weighted_mean(outlier, _shares((1, 10**6, 10**6))).to(dtype), exact, torch.finfo(dtype).eps)


# Trainings whose gradients are given, so that what must come of them is known

STEPS = 16


def _given(worker: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + worker)
    return {name: torch.randn(24, 16, generator=generator, dtype=torch.float64) for name in ("a", "b")}


def _count(worker: int, step: int) -> int:
    return SIZES[worker] + (3 * step + worker) % 5


class Pair(nn.Module):
    """Two matrices, each a fragment; the loss is linear, and its gradients are given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(24, 16, dtype=dtype)) for _ in range(2))

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return torch.stack([(p * given[name].to(p.dtype)).sum() for name, p in self.named_parameters()]).sum()


def _mean_of(vectors: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    return torch.stack([n * v for n, v in zip(counts, vectors, strict=True)]).sum(0) / sum(counts)


def _gradients(worker: int, plan: str, kind: str, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """Train; return the sum of the gradients that were delivered, and the residuals."""
    module = Pair(dtype)
    model = DDP(module) if kind == "ddp" else module
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    delivered = {name: torch.zeros(24, 16, dtype=torch.float64) for name in ("a", "b")}
    with laconic.attach(laconic.plan(plan), model, optimizer, weighted=True, **options) as session:
        for step in range(STEPS):
            if step == 8 and "bits=2" in plan:  # what the old codec has not delivered is carried over
                session.change(laconic.plan("Plan(codec=ErrorFeedback(LowRank(rank=2)))"))
            session.weigh(0 if (worker, step) == (3, 4) else _count(worker, step))
            given = _given(worker, step)
            if (worker, step) in ((1, 2), (3, 4)):  # NaN where it is left out, and where it weighs nothing
                given = {name: t * torch.nan for name, t in given.items()}
            if worker == 2 and step == 5:  # NaN of whom nothing is known yet
                given["b"][0, 0] = torch.inf
            model(given).backward()
            optimizer.step()
            for name, p in module.named_parameters():
                assert p.grad is not None
                delivered[name] += p.grad.double()
            optimizer.zero_grad()
        left = {name: r.double() for name, r in residuals_by_name(session.state_dict()["state"]["gradient"]).items()}
    return delivered, left


GRADIENTS = [
    ("ddp()", "ddp", torch.float32),
    ("quantized_ddp(bits=2)", "ddp", torch.float32),  # few bits × exclude
    ("quantized_ddp(bits=2)", "bare", torch.bfloat16),  # × bf16
    ("Plan(codec=ErrorFeedback(LowRank(rank=2)))", "ddp", torch.float64),
    ("Plan(codec=ErrorFeedback(LowRank(rank=2, bits=4)))", "bare", torch.float16),
    ("Plan(codec=ErrorFeedback(Cast('bf16')))", "ddp", torch.bfloat16),
]


@pytest.mark.parametrize(
    ("plan", "kind", "dtype"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (index > 1)) for index, case in enumerate(GRADIENTS)],
    ids=str,
)
def test_an_excluded_worker_weighs_nothing_and_nothing_else_is_lost(plan, kind, dtype):
    results = run_workers(_gradients, 4, (plan, kind, dtype, {"nonfinite": "exclude"}))
    for name in ("a", "b"):
        truth = torch.zeros(24, 16, dtype=torch.float64)
        for step in range(STEPS):
            bad = {1} if step == 2 else {3} if step == 4 else {2} if step == 5 else set()
            counts = [0 if worker in bad else _count(worker, step) for worker in range(4)]
            truth += _mean_of([_given(worker, step)[name].to(dtype).double() for worker in range(4)], counts)
        left = torch.stack([residual.get(name, torch.zeros(24, 16)) for _, residual in results]).mean(0)
        for delivered, _ in results:
            eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps if dtype != torch.float64 else 0)
            tight = 1e-4 if "Feedback" in plan or "quantized" in plan else 16 * eps
            torch.testing.assert_close(delivered[name] + left, truth, rtol=0, atol=(tight if eps < 1e-6 else 0.05))


def _rounds(worker: int, plans: list[str], nan: bool, commit: str) -> list[Any]:
    """Train by local steps at a learning rate of 1; return how far the shared weights are, and the residuals."""
    found = []
    for plan in plans:
        model = Pair(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with laconic.attach(laconic.plan(plan), model, optimizer, weighted=True, commit=commit) as session:  # type: ignore[arg-type]
            for step in range(1, STEPS + 1):
                session.weigh(_count(worker, step))
                model(_given(worker, step)).backward()
                if nan and step == 6 and worker == 3:
                    model.a.grad[0, 0] = torch.nan  # type: ignore[index]
                optimizer.step()
                optimizer.zero_grad()
            state = session.state_dict()
        left = {name: r.double() for name, r in residuals_by_name(state["state"]["weights"]).items()}
        shared = state["anchor"] or {name: p.detach().clone() for name, p in model.named_parameters()}
        found.append(({name: -t for name, t in shared.items()}, left))
    return found


def _truth_of_rounds(plan: laconic.Plan, nan: bool) -> dict[str, Tensor]:
    """Return how far all rounds together must move the weights of plans whose outer step takes the mean."""
    moved = {name: torch.zeros(24, 16, dtype=torch.float64) for name in ("a", "b")}
    own = [{name: torch.zeros(24, 16, dtype=torch.float64) for name in moved} for _ in range(4)]
    since = dict.fromkeys(moved, 0)
    inner = plan.topology.inner
    for step in range(1, STEPS + 1):
        for worker in range(4):
            for name in moved:
                others = [worker] if inner is None else [worker - worker % 2, worker - worker % 2 + 1]
                grads = [_given(each, step)[name] for each in others]
                own[worker][name] += _mean_of(grads, [_count(each, step) for each in others])
        for sync in plan.syncs_at(step):
            if sync.payload is not Payload.WEIGHTS:
                continue
            # The delay ends before training does: each fragment that was sent has taken effect.
            names = ["a", "b"] if sync.fragment is None else [["a", "b"][sync.fragment]]
            for name in names:
                counts = [sum(_count(w, s) for s in range(since[name] + 1, step + 1)) for w in range(4)]
                if plan.is_outermost(sync):
                    if nan and since[name] < 6 <= step:
                        counts[3] = 0
                    moved[name] += _mean_of([each[name] for each in own], counts)
                    own = [{**each, name: torch.zeros(24, 16, dtype=torch.float64)} for each in own]
                    since[name] = step
                else:
                    for first in (0, 2):
                        both = _mean_of([own[w][name] for w in (first, first + 1)], counts[first : first + 2])
                        own[first][name], own[first + 1][name] = both.clone(), both.clone()
    return moved


ROUNDS = [
    "Plan(schedule=Every(4))",  # weights, no anchor
    "Plan(schedule=Every(4), codec=ErrorFeedback(Quantized(2)))",
    "Plan(schedule=Every(4), codec=ErrorFeedback(LowRank(rank=2)))",
    "Plan(schedule=Every(4), codec=Cast('bf16'))",
    "Plan(schedule=Every(4), topology=Groups(2))",
    "Plan(schedule=Every(4), codec=ErrorFeedback(Quantized(4)), topology=Groups(2))",
    "Plan(schedule=Streaming(period=4, fragments=2), codec=ErrorFeedback(Quantized(4)))",
    "Plan(schedule=Streaming(period=5, fragments=2, delay=1), codec=ErrorFeedback(Quantized(2)))",
    "Plan(schedule=Streaming(period=5, fragments=2, delay=1))",
]


@pytest.mark.parametrize(
    ("nan", "commit"), [(False, "streaming"), pytest.param(True, "atomic", marks=pytest.mark.slow)]
)
def test_rounds_move_the_weights_by_the_weighted_mean(nan, commit):
    plans = [text for text in ROUNDS if not (nan and ("Streaming" in text or "Groups" in text))]
    results = run_workers(_rounds, 4, (plans, nan, commit))
    for index, text in enumerate(plans):
        truth = _truth_of_rounds(laconic.plan(text), nan)
        for name, expected in truth.items():
            left = torch.stack([worker[index][1].get(name, torch.zeros(24, 16)) for worker in results]).mean(0)
            for worker in results:
                close = torch.allclose(
                    worker[index][0][name] + left, expected, rtol=0, atol=0.05 if "bf16" in text else 1e-9
                )
                assert close, text


def _nested(worker: int) -> Tensor:
    model = Pair(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with laconic.attach(laconic.hierarchical_sgd({2: 2, 4: 4}), model, optimizer, weighted=True) as session:
        for step in range(1, 9):
            session.weigh(_count(worker, step))
            model(_given(worker, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return -model.a.detach()


def test_larger_groups_weigh_by_what_was_counted_since_they_last_averaged():
    def own(worker: int, first: int, last: int) -> Tensor:
        return sum(_given(worker, step)["a"] for step in range(first, last + 1))  # type: ignore[return-value]

    def count(worker: int, first: int, last: int) -> int:
        return sum(_count(worker, step) for step in range(first, last + 1))

    truth = torch.zeros(24, 16, dtype=torch.float64)
    for start in (1, 5):
        ends = []
        for worker in range(4):
            both = [worker - worker % 2, worker - worker % 2 + 1]
            group = _mean_of([own(w, start, start + 1) for w in both], [count(w, start, start + 1) for w in both])
            ends.append(group + own(worker, start + 2, start + 3))
        truth += _mean_of(ends, [count(w, start, start + 3) for w in range(4)])
    for moved in run_workers(_nested, 4):
        torch.testing.assert_close(moved, truth, rtol=0, atol=1e-9)


class _Bf16(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(64, 32).to(torch.bfloat16))
        self.norm = nn.BatchNorm1d(4)


def _half_weights(worker: int, move: bool) -> tuple[Tensor, Tensor, Tensor]:
    model = _Bf16()
    start = model.weight.detach().clone()
    optimizer = torch.optim.SGD([model.weight, *model.norm.parameters()], lr=1.0)
    with laconic.attach(laconic.post_local_sgd(period=2), model, optimizer, weighted=True) as session:
        for _ in range(4):
            session.weigh(SIZES[worker])
            if move:
                model.norm.running_mean.fill_(float(worker))  # type: ignore[union-attr]
                model.weight.grad = torch.full_like(start, float(worker))
            optimizer.step()
    return start, model.weight.detach(), model.norm.running_mean.clone()  # type: ignore[union-attr]


def test_weights_in_bf16_and_buffers_are_averaged_by_differences():
    for start, weight, _ in run_workers(_half_weights, 4, (False,)):  # equal replicas stay bit-equal
        assert torch.equal(start, weight)
    for start, weight, statistics in run_workers(_half_weights, 4, (True,)):
        of_workers = _mean_of([torch.full_like(start, float(w)).double() for w in range(4)], SIZES)
        torch.testing.assert_close(weight.double(), start.double() - 4 * of_workers, rtol=2**-7, atol=2**-4)
        torch.testing.assert_close(statistics, torch.full((4,), (8 + 16 + 96) / 56))


# Resume, changes of the plan, and what is refused


def _resumed(worker: int, text: str, at: int) -> list[Tensor]:
    def attach(model: nn.Module) -> tuple[torch.optim.Optimizer, laconic.Session]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return optimizer, laconic.attach(laconic.plan(text), model, optimizer, weighted=True)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, session: laconic.Session, steps: range) -> None:
        for step in steps:
            session.weigh(_count(worker, step))
            x, y = _own(worker, step)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    model = net()
    optimizer, session = attach(model)
    train(model, optimizer, session, range(at))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), session.state_dict()])
    train(model, optimizer, session, range(at, 13))
    session.detach()
    again = net()
    optimizer, session = attach(again)
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    session.load_state_dict(saved[2])
    train(again, optimizer, session, range(at, 13))
    session.detach()
    return [weights(model), weights(again)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["diloco(period=4)", "streaming_diloco(period=4, fragments=2, delay=1)", "hierarchical_sgd({2: 2, 4: 4})"]
)
def test_what_was_counted_so_far_survives_a_resume(text):
    for whole, resumed in run_workers(_resumed, 4, (text, 7)):  # in the middle of a round
        assert torch.equal(whole, resumed)


def _changed(worker: int) -> Tensor:
    """A round and a half of deltas in few bits, then gradients: residuals and local steps of the half are not lost."""
    model = Pair(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = laconic.plan("Plan(schedule=Every(4), codec=ErrorFeedback(Quantized(2)))")
    with laconic.attach(plan, model, optimizer, weighted=True) as session:
        for step in range(1, 9):
            if step == 7:
                session.change(laconic.ddp())
            session.weigh(_count(worker, step))
            model(_given(worker, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return -model.a.detach()


def test_a_change_of_the_plan_loses_nothing():
    truth = torch.zeros(24, 16, dtype=torch.float64)
    for first, last in ((1, 4), (5, 6), (7, 7), (8, 8)):
        own = [sum(_given(worker, step)["a"] for step in range(first, last + 1)) for worker in range(4)]
        counts = [sum(_count(worker, step) for step in range(first, last + 1)) for worker in range(4)]
        truth += _mean_of(own, counts)  # type: ignore[arg-type]
    for moved in run_workers(_changed, 4):
        torch.testing.assert_close(moved, truth, rtol=0, atol=1e-9)


def _skipped(worker: int) -> tuple[Tensor, list[str]]:
    model = Pair(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    log = listen()
    with laconic.attach(laconic.ddp(), model, optimizer, weighted=True) as session:
        for step in (1, 2):
            if (worker, step) == (1, 2):
                model(_given(worker, step)).backward()
                session.skip()  # it has counted nothing in this step: its gradient weighs nothing
                continue
            session.weigh(_count(worker, step))
            model(_given(worker, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return -model.a.detach(), log


def test_a_step_that_is_skipped_counts_nothing():
    moved = run_workers(_skipped, 2)[0][0]
    first = _mean_of([_given(w, 1)["a"] for w in (0, 1)], [_count(w, 1) for w in (0, 1)])
    torch.testing.assert_close(moved, first + _given(0, 2)["a"])


def _uncounted(worker: int, kind: str, text: str, steps: int, who: list[int]) -> str:
    model: nn.Module = sharded(two_by_two()) if kind == "fsdp" else DDP(net()) if kind == "ddp" else net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.plan(text), model, optimizer, weighted=True) as session:
        for step in range(1, steps + 1):
            if worker not in who:
                session.weigh(8)
            try:
                F.mse_loss(model(torch.ones(2, 8)), torch.ones(2, 1)).backward()
                optimizer.step()
            except RuntimeError as error:
                assert step == steps
                return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "text", "steps", "who", "named"),
    [
        ("ddp", "ddp()", 1, [1], "worker 1"),
        ("bare", "ddp()", 1, [0, 1, 2, 3], "workers 0, 1, 2, 3"),
        ("bare", "diloco(period=2)", 2, [3], "worker 3"),
        ("fsdp", "ddp()", 1, [3], "replica 1"),
    ],
)
def test_a_worker_that_has_not_counted_is_named_on_all(kind, text, steps, who, named):
    for said in run_workers(_uncounted, 4, (kind, text, steps, who)):
        assert re.search(
            rf"step {steps}: {named} \(world\) counted nothing, and attach(.|\n)*Call session\.weigh\(n\)", said
        )


def _disagree(worker: int) -> None:
    model = mlp(depth=1)
    laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters(), lr=0.1), weighted=worker == 1)


def test_all_workers_weigh_or_none():
    with pytest.raises(
        WorkerError, match=r"DisagreementError: the workers disagree about what is attached: .*weighted"
    ):
        run_workers(_disagree, 2)


def test_bad_input_is_refused():
    model = mlp(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"attach\(weighted=32\): it must be True or False.*session\.weigh\(n\)"):
        laconic.attach(laconic.ddp(), model, optimizer, weighted=32)  # type: ignore[arg-type]
    with (
        laconic.attach(laconic.ddp(), model, optimizer) as plain,
        pytest.raises(RuntimeError, match=r"weigh\(8\): this session does not weigh.*attach\(\.\.\., weighted=True\)"),
    ):
        plain.weigh(8)
    with laconic.attach(laconic.ddp(), model, optimizer, weighted=True) as session:
        for n in (-1, 2.5, True, torch.tensor(3)):
            with pytest.raises(ValueError, match=r"weigh\(.*\): it must be a whole number.*int\(tensor\)"):
                session.weigh(n)  # type: ignore[arg-type]
        state = session.state_dict()
    with (
        laconic.attach(laconic.ddp(), model, optimizer) as plain,
        pytest.raises(ValueError, match=r"whose workers weigh by what they count.*weighted=True"),
    ):
        plain.load_state_dict(state)


def test_of_all_weights_what_was_counted_since_the_oldest_fragment_counts():
    counts, plan = Counts(), laconic.streaming_diloco(period=4, fragments=2)
    for step in range(1, 8):
        counts.add(step)
        for sync in plan.syncs_at(step):
            counts.synced(plan, sync)
    assert counts.of_all_weights(plan) == 5 + 6 + 7  # one fragment was sent after step 4, one after step 6
    counts.all_synced()
    assert counts.of_all_weights(plan) == 0


def test_lockstep_serves_weighted_means():
    def exchange(value: float) -> Exchange[Tensor]:
        return (yield Mean(torch.tensor([value]), wide=True, shares=(0.5, 1.5)))

    for means in (exact_mean, gloo_mean):
        assert [float(got) for got in lockstep([exchange(1.0), exchange(3.0)], mean=means)] == [2.5, 2.5]


# Combinations


def _sharded_rounds(worker: int) -> Tensor:
    model = sharded(two_by_two())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with laconic.attach(laconic.post_local_sgd(period=2), model, optimizer, weighted=True) as session:
        for step in range(4):
            session.weigh(_count(worker, step))
            x, y = _own(worker, step, (8, 8, 8, 8))
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])  # type: ignore[attr-defined]


def test_replicas_weigh_by_what_all_of_their_workers_have_counted():
    replicas = [net(), net()]
    for first in (0, 2):
        ends = []
        for replica, model in enumerate(replicas):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for step in (first, first + 1):
                both = [_own(w, step, (8, 8, 8, 8)) for w in (2 * replica, 2 * replica + 1)]
                optimizer.zero_grad()
                (sum(F.mse_loss(model(x), y) for x, y in both) / 2).backward()  # type: ignore[union-attr]
                optimizer.step()
            ends.append(weights(model).double())
        counts = [sum(_count(2 * r + w, s) for w in (0, 1) for s in (first, first + 1)) for r in (0, 1)]
        shared = _mean_of(ends, counts)
        for model in replicas:
            nn.utils.vector_to_parameters(shared.float(), model.parameters())
    results = run_workers(_sharded_rounds, 4)
    assert_equal_bits(results)
    torch.testing.assert_close(results[0], weights(replicas[0]), rtol=1e-5, atol=1e-6)


def _with_all(worker: int, kind: str) -> list[Any]:
    """A GradScaler, clipping, error feedback, a guard and a signal to stop at once."""
    model = sharded(two_by_two()) if kind == "fsdp" else DDP(net(), bucket_cap_mb=0.002) if kind == "ddp" else net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3) if kind != "fsdp" else None
    options: dict[str, Any] = {"scaler": scaler, "clip_norm": 0.5, "observers": [laconic.Guard("warn", every=2)]}
    steps = 0
    with laconic.attach(laconic.quantized_ddp(bits=4), model, optimizer, weighted=True, **options) as session:
        session.stop_on(signal.SIGTERM, every_s=0.01)
        for step in range(40):
            if step == 10 and worker == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            session.weigh(_count(worker, step))
            x, y = _own(worker, step)
            loss = F.mse_loss(model(x), y)
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            steps += 1
            if session.should_stop:
                break
        health = session.health
        state = session.state_dict()
    moved = torch.cat([getattr(p, "full_tensor", lambda p=p: p)().detach().reshape(-1) for p in model.parameters()])
    return [moved, steps, health and health.residual, sorted(state["counted"])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "bare", "fsdp"])
def test_with_a_scaler_clipping_feedback_a_guard_and_a_signal(kind):
    results = run_workers(_with_all, 4, (kind,))
    assert_equal_bits([moved for moved, *_ in results])
    assert results[0][0].isfinite().all()
    assert len({steps for _, steps, *_ in results}) == 1
    assert results[0][1] == 11  # the header of the same step tells it to all
    assert len({health for _, _, health, _ in results[: 1 if kind == "fsdp" else None]}) == 1


def _two_optimizers(worker: int) -> Tensor:
    model = net()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9) for part in (model[:2], model[2:])]
    with laconic.attach(laconic.ddp(), model, optimizers, weighted=True) as session:
        for step in range(6):
            session.weigh(SIZES[worker])
            x, y = _own(worker, step)
            F.mse_loss(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return weights(model)


@pytest.mark.slow
def test_several_optimizers_use_the_counts_of_one_step():
    results = run_workers(_two_optimizers, 4)
    assert_equal_bits(results)
    torch.testing.assert_close(results[0], _one_process(6), rtol=1e-5, atol=1e-6)


def _one_is_lost(worker: int, kind: str) -> str:
    module = net()
    model = DDP(module) if kind == "ddp" else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = laconic.attach(laconic.ddp(), model, optimizer, weighted=True, timeout_s=4)
    try:
        for step in range(3):
            if (worker, step) == (1, 2):
                time.sleep(12)
                return ""
            session.weigh(8)
            x, y = _own(worker, step)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    except laconic.LostWorkerError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "bare"])
def test_a_worker_that_is_lost_before_it_has_counted_is_named(kind):
    found = run_workers(_one_is_lost, 3, (kind,))
    assert "worker 1" in found[0]
    assert "worker 1" in found[2]


def test_what_was_counted_is_saved_in_a_checkpoint(tmp_path):
    model = mlp(depth=1)
    plan, optimizer = laconic.streaming_diloco(period=4, fragments=2), torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(plan, model, optimizer, weighted=True) as session:
        for n in (3, 0, 5):
            session.weigh(n)
            model(torch.ones(2, 32)).sum().backward()
            optimizer.step()
        checkpoint.save(tmp_path, {"session": session.state_dict()}, step=session.step)
        saved = checkpoint.load(tmp_path).state["session"]
        assert saved["counted"] == session.state_dict()["counted"]
        session.load_state_dict(saved)
        assert session.state_dict()["counted"]["now"] == [3, 8]


def _clipped(worker: int, kind: str, dtype: torch.dtype, plan: str) -> list[dict[str, Tensor]]:
    """Return the gradient that each step was taken with; on shards, NaN comes from worker 1 in step 2."""
    module: nn.Module = Pair(dtype)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(module, mesh=two_by_two())
    model = DDP(module) if kind == "ddp" else module
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps = []
    options: dict[str, Any] = {"clip_norm": 2.0, "nonfinite": "exclude"}
    with laconic.attach(laconic.plan(plan), model, optimizer, weighted=True, **options) as session:
        for step in range(4):
            session.weigh(_count(worker, step))
            nan = torch.nan if kind == "fsdp" and (worker, step) == (1, 2) else 1.0
            (model(_given(worker, step)) * nan).backward()
            optimizer.step()
            grads = {name: p.grad for name, p in module.named_parameters()}
            steps.append({name: getattr(g, "full_tensor", lambda g=g: g)().clone() for name, g in grads.items()})
            optimizer.zero_grad()
    return steps


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("ddp", torch.bfloat16), ("bare", torch.bfloat16), ("ddp", torch.float16), ("fsdp", torch.float32)],
    ids=str,
)
def test_the_weighted_mean_is_clipped(kind, dtype):
    results = run_workers(_clipped, 4, (kind, dtype, "ddp()"))
    for step in range(4):
        counts = [_count(worker, step) for worker in range(4)]
        if kind == "fsdp":  # a replica is left out with all its shards
            counts = [0 if step == 2 and w < 2 else counts[w - w % 2] + counts[w - w % 2 + 1] for w in range(4)]
        truth = {n: _mean_of([_given(w, step)[n].to(dtype).double() for w in range(4)], counts) for n in ("a", "b")}
        norm = torch.cat([t.reshape(-1) for t in truth.values()]).norm()
        assert norm > 2
        for worker in results:
            for name, exact in truth.items():
                clipped = exact * 2 / norm
                assert_close(worker[step][name], clipped, 4 * torch.finfo(dtype).eps)
