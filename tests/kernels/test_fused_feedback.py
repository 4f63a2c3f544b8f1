"""The fused paths against the plain composition that they replace: `ErrorFeedback(LowRank)`.

The tests run the in-place products on the CPU and the Triton kernels on a GPU (`pytest -m gpu`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.codecs import ByShape, ErrorFeedback, LowRank
from laconic.comm.lockstep import in_turn, lockstep
from laconic.exchange import State
from laconic.kernels.orthonormal import orthonormal
from tests.kernels.gradients import DEVICES, SHAPES, close, inputs, run
from tests.laws.world import exchanges_of, same_bits


def each_shape(quick: Sequence[str]) -> pytest.MarkDecorator:
    """Test all shapes; those that are not `quick` are marked slow."""
    marks = {name: [] if name in quick else [pytest.mark.slow] for name in SHAPES}
    return pytest.mark.parametrize("shapes", [pytest.param(SHAPES[n], id=n, marks=marks[n]) for n in SHAPES])


def each_rank(ranks: Sequence[int], quick: Sequence[int]) -> pytest.MarkDecorator:
    """Test all ranks; those that are not `quick` are marked slow."""
    return pytest.mark.parametrize(
        "rank", [pytest.param(rank, marks=[] if rank in quick else [pytest.mark.slow]) for rank in ranks]
    )


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@each_rank([1, 2, 4, 16], quick=[1, 4])
@each_shape(quick=["odd", "repeated"])
@pytest.mark.parametrize("device", DEVICES)
def test_fifty_steps_equal_the_plain_composition(device, shapes, rank, rounds):
    codec = ErrorFeedback(LowRank(rank, min_compression=0, rounds=rounds))
    plain: list[State] = [{}, {}]
    fast: list[State] = [{}, {}]
    for step in range(50):
        tensors = inputs(shapes, 2, step, device, torch.float32)
        expected = run(codec, tensors, plain, fast=False)
        got = run(codec, copy.deepcopy(tensors), fast, fast=True)
        for name in expected[0]:
            assert torch.equal(got[0][name], got[1][name])
            close(got[0][name], expected[0][name], 1e-5, of=expected[0][name])
            close(fast[0]["residual"][name], plain[0]["residual"][name], 1e-5, of=tensors[0][name])
        # Two right implementations diverge where singular values are equal, so each step starts from the same state.
        for a, b in zip(fast, plain, strict=True):
            _copy(a, b)
    assert any(key.startswith("_fused") for key in fast[0]["inner"]) == (device == "cuda")


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@each_rank([8, 32, 64], quick=[32])
@pytest.mark.parametrize("device", DEVICES)
def test_high_ranks_equal_the_plain_composition(device, rank, rounds):
    shapes = [(136, 200), (200, 136), (301, 75), (75, 130, 3), (700, 301)]  # the last in blocks of rows on the CPU
    codec = ErrorFeedback(LowRank(rank, min_compression=0, rounds=rounds))
    plain: list[State] = [{}, {}]
    fast: list[State] = [{}, {}]
    for step in range(8):
        tensors = inputs(shapes, 2, step, device, torch.float32)
        expected = run(codec, tensors, plain, fast=False)
        got = run(codec, copy.deepcopy(tensors), fast, fast=True)
        for name in expected[0]:
            assert torch.equal(got[0][name], got[1][name])
            close(got[0][name], expected[0][name], 1e-5, of=tensors[0][name])
            close(fast[0]["residual"][name], plain[0]["residual"][name], 1e-5, of=tensors[0][name])
        for a, b in zip(fast, plain, strict=True):
            _copy(a, b)


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_results_do_not_depend_on_the_place_in_memory(dtype, rounds):
    codec = ErrorFeedback(LowRank(8, rounds=rounds))
    shape = torch.Size((700, 301))

    def means(offset: int) -> list[Tensor]:
        state: list[State] = [{}]
        found = []
        for step in range(3):
            [gradient] = inputs([shape], 1, step, "cpu", dtype)
            [(name, given)] = gradient.items()
            place = torch.empty(offset + given.numel(), dtype=dtype)[offset:].view(shape)
            found += [run(codec, [{name: place.copy_(given)}], state, fast=True)[0][name].clone()]
        return [*found, state[0]["residual"][name]]

    first = means(offset=0)
    for offset in (1, 3, 8, 13):
        assert all(map(torch.equal, means(offset), first))


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@pytest.mark.parametrize("device", DEVICES)
def test_matrices_and_the_rest_in_one_exchange_equal_the_plain_composition(device, rounds):
    shapes = [(96, 64), (64,), (40, 37), (37,), (1500,), (64, 96), (3, 2)]
    codec = ByShape(ErrorFeedback(LowRank(2, min_compression=1, rounds=rounds)))
    plain: list[State] = [{}, {}]
    fast: list[State] = [{}, {}]
    memory = inputs([(1 if len(s) < 2 else s[0], *s[-1:]) for s in shapes], 2, 0, device, torch.float32)
    for step in range(6):
        fresh = inputs([(1 if len(s) < 2 else s[0], *s[-1:]) for s in shapes], 2, step, device, torch.float32)
        for into, new in zip(memory, fresh, strict=True):  # as in DDP: the same tensors with new values
            for name, t in into.items():
                t.copy_(new[name])
        if step == 3:
            memory[1]["w1"].flatten()[0] = float("nan")  # not a matrix, but the whole step is void
        kept = copy.deepcopy(fast[0].get("codec", {}).get("residual"))
        expected = run(codec, memory, plain, fast=False)
        got = run(codec, memory, fast, fast=True)
        for name, mean in expected[0].items():
            if step == 3:
                assert not got[0]["w1"].isfinite().all()
                continue
            assert torch.equal(got[0][name], got[1][name])
            close(got[0][name], mean, 1e-4, of=mean)
        if step == 3:
            assert all(torch.equal(fast[0]["codec"]["residual"][name], x) for name, x in kept.items())
    assert ("_bound" in fast[0]["codec"]["inner"]) == (device == "cuda")


def _copy(into: State, state: State) -> None:
    for name, residual in state["residual"].items():
        into["residual"][name].copy_(residual)
    for key in ("p", "q"):
        for name, factor in state["inner"].get(key, {}).items():
            if name in into["inner"].get(key, {}):
                into["inner"][key][name].copy_(orthonormal(factor))


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@each_shape(quick=["repeated"])
def test_fifty_consecutive_steps_in_float64_equal_the_plain_composition(shapes, rounds):
    codec = ErrorFeedback(LowRank(3, min_compression=0, rounds=rounds))
    plain: list[State] = [{}, {}]
    fast: list[State] = [{}, {}]
    for step in range(50):
        tensors = inputs(shapes, 2, step, "cpu", torch.float64)
        expected = run(codec, tensors, plain, fast=False)
        got = run(codec, tensors, fast, fast=True)
        for name in expected[0]:
            close(got[0][name], expected[0][name], 1e-7)


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_means_plus_mean_residuals_equal_the_sum_of_inputs(device, dtype, rounds):
    shapes = SHAPES["odd"]
    codec = ErrorFeedback(LowRank(2, rounds=rounds, min_compression=0))
    states: list[State] = [{}, {}, {}]
    truth: dict[str, Any] = {}
    delivered: dict[str, Any] = {}
    for step in range(20):
        tensors = inputs(shapes, 3, step, device, dtype)
        for name in tensors[0]:
            truth[name] = truth.get(name, 0) + sum(t[name].double() for t in tensors) / 3
        means = run(codec, tensors, states, fast=True)
        for name, mean in means[0].items():
            delivered[name] = delivered.get(name, 0) + mean.double()
    for name in truth:
        residual = sum(s["residual"][name].double() for s in states) / 3
        assert states[0]["residual"][name].dtype == torch.float32
        close(delivered[name] + residual, truth[name], 1e-5)


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@pytest.mark.parametrize("device", DEVICES)
def test_zeros_dependent_columns_and_extremes_stay_finite(device, rounds):
    codec = ErrorFeedback(LowRank(4, rounds=rounds, min_compression=0))
    states: list[State] = [{}, {}]
    shapes = [(40, 48), (48, 40), (64, 33)]
    for step in range(12):
        tensors = inputs(shapes, 2, step, device, torch.float32)
        for t in tensors:
            if step % 4 == 0:
                t["w0"].zero_()
            if step % 3 == 0:
                t["w1"].copy_(torch.outer(t["w1"][:, 0], t["w1"][0]))  # of rank 1
            t["w2"].mul_(10.0 ** (20 if step % 2 else -20))
        for mean in run(codec, tensors, states, fast=True):
            assert all(x.isfinite().all() for x in mean.values())
        assert all(x.isfinite().all() for s in states for x in s["residual"].values())


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_zero_gradient_gives_zero_and_keeps_the_factors(device, rounds):
    codec = ErrorFeedback(LowRank(2, rounds=rounds, min_compression=0))
    states: list[State] = [{}]
    run(codec, inputs([(40, 48)], 1, 0, device, torch.float32), states, fast=True)
    states[0]["residual"]["w0"].zero_()
    tensors = inputs([(40, 48)], 1, 1, device, torch.float32)
    tensors[0]["w0"].zero_()
    means = run(codec, tensors, states, fast=True)
    assert not means[0]["w0"].any()
    q = states[0]["inner"]["q"]["w0"]
    assert q.isfinite().all()
    assert q.any()


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("device", DEVICES)
def test_a_nonfinite_step_does_not_change_residuals_and_factors(device, bad, rounds):
    codec = ErrorFeedback(LowRank(2, rounds=rounds, min_compression=0))
    states: list[State] = [{}, {}]
    for step in range(3):
        run(codec, inputs(SHAPES["odd"], 2, step, device, torch.float32), states, fast=True)
    kept = [copy.deepcopy(s["residual"]) for s in states]
    factors = [{n: x.clone() for n, x in s["inner"]["q"].items()} for s in states]
    tensors = inputs(SHAPES["odd"], 2, 3, device, torch.float32)
    tensors[1]["w0"][3, 4] = bad
    means = run(codec, tensors, states, fast=True)
    assert not means[0]["w0"].isfinite().all()
    for s, residual, q in zip(states, kept, factors, strict=True):
        for name in residual:
            assert torch.equal(s["residual"][name], residual[name])
            assert torch.equal(s["inner"]["q"][name], q[name])
    for step in range(4, 7):
        for mean in run(codec, inputs(SHAPES["odd"], 2, step, device, torch.float32), states, fast=True):
            assert all(x.isfinite().all() for x in mean.values())


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@pytest.mark.parametrize("fast", [False, True], ids=["plain", "fast"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_another_bucket_voids_changes_nothing(device, fast, rounds):
    codec = ByShape(ErrorFeedback(LowRank(2, rounds=rounds, min_compression=0)))
    states: list[State] = [{}, {}]
    for step in range(6):
        kept = [_saved(state, device) for state in states]
        buckets = [inputs(SHAPES[name], 2, step, device, torch.float32) for name in ("odd", "square")]
        renamed = [[{f"{i}.{n}": t for n, t in worker.items()} for worker in b] for i, b in enumerate(buckets)]
        rest = [{"bias": torch.full((5,), 1.0, device=device)} for _ in states]  # a bucket that keeps no state
        void = {2: renamed[0][1]["0.w1"][3], 3: renamed[1][0]["1.w0"][3], 4: rest[1]["bias"]}.get(step)
        if void is not None:
            void[0] = torch.nan
        by_bucket = [exchanges_of(codec, bucket, states, reuse=fast) for bucket in [*renamed, rest]]
        ends = lockstep([in_turn(each) for each in zip(*by_bucket, strict=True)])
        assert [bool(end.finite()) for worker in ends for end in worker[:2]] == [void is None] * 4
        if step:
            same = [same_bits(_saved(s, device), was) for s, was in zip(states, kept, strict=True)]
            assert same == [void is not None] * 2


def _saved(state: State, device: str) -> Any:
    """Copy what a checkpoint holds; on CUDA without the number of calls, which nothing there waits to know."""
    unsaved = {"turn"} if device == "cuda" else set()
    return {
        key: _saved(value, device) if isinstance(value, dict) else value.clone() if isinstance(value, Tensor) else value
        for key, value in state.items()
        if not key.startswith("_") and key not in unsaved
    }


@pytest.mark.parametrize("device", DEVICES)
def test_a_new_bucket_layout_and_a_restored_state_continue_the_run(device):
    codec = ByShape(ErrorFeedback(LowRank(2, min_compression=0)))
    one: list[State] = [{}]
    other: list[State] = [{}]
    for step in range(8):
        whole = inputs(SHAPES["repeated"], 1, step, device, torch.float32)[0]
        halves = copy.deepcopy(whole)
        got = run(codec, [whole], one, fast=True)[0]
        names = list(halves)
        cut = 3 if step < 4 else 5  # a new layout of DDP's buckets
        parts: dict[str, Tensor] = {}
        for some in (names[:cut], names[cut:]):
            parts |= run(codec, [{n: halves[n] for n in some}], other, fast=True)[0]
        if step == 5:
            saved = other[0]["codec"]
            inner = {k: v for k, v in saved["inner"].items() if not k.startswith("_")}
            other = [{"codec": copy.deepcopy({"residual": saved["residual"], "inner": inner}), "rest": {}}]
        for name in names:
            close(parts[name], got[name], 1e-4)
