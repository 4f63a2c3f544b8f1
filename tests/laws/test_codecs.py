"""Laws that every codec satisfies: one test for each law, over the list `CODECS`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.algorithms.ddp_comm_hooks.powerSGD_hook import Batched
from laconic.codecs import ByShape, Codec, ErrorFeedback, Exact, LowRank
from laconic.comm.dry import dry
from laconic.exchange import Peers, State, Tensors
from laconic.ledger import Ledger
from tests.laws.codecs import (
    CODECS,
    COLD,
    FEEDBACK,
    FEW_BITS,
    FUSED,
    PLAIN_LOW_RANK,
    RANK_DEFICIENT,
    TENSOR_BY_TENSOR,
    WARM,
    assert_close,
    each,
    each_path,
    each_world,
    half_and_single,
    rounding,
    subtracts,
)
from tests.laws.world import World, carried, in_place, leaves, residuals, same_bits, side_by_side, true_mean


@each_path(CODECS)
@each_world
def test_every_worker_ends_with_the_same_bits(codec: Codec, reuse: bool, workers: int, dtype: torch.dtype) -> None:
    world = World(codec, workers, reuse)
    for step in range(2):
        inputs = world.inputs(step, dtype)
        ends = world.average(inputs)
        assert len(ends) == workers
        for end in ends:
            assert same_bits(end.mean, ends[0].mean)
            assert list(end.mean) == list(inputs[0])
            assert all(end.mean[name].shape == t.shape for name, t in inputs[0].items())
            assert bool(end.finite())
            assert all(t.isfinite().all() for t in end.mean.values())


@each(CODECS)
@each_world
def test_own_parts_average_to_the_mean(codec: Codec, workers: int, dtype: torch.dtype) -> None:
    world = World(codec, workers)
    for step in range(2):
        ends = world.average(world.inputs(step, dtype))
        owns = [end.own() for end in ends]
        assert all(not torch.equal(owns[0]["square.weight"], own["square.weight"]) for own in owns[1:])
        for name, mean in true_mean(owns).items():
            scale = torch.stack([own[name] for own in owns])
            assert_close(ends[0].mean[name], mean, 4 * rounding(codec, dtype), scale)


@each([codec for codec in TENSOR_BY_TENSOR if codec not in FEW_BITS])
@each_world
def test_lossless_codecs_return_the_mean(codec: Codec, workers: int, dtype: torch.dtype) -> None:
    world = World(codec, workers)
    inputs = world.inputs("once", dtype)
    mean, truth = world.average(inputs)[0].mean, true_mean(inputs)
    for name in inputs[0]:
        if "LowRank" not in repr(codec) or not inputs[0][name].dim() > 1:
            scale = torch.stack([given[name] for given in inputs])
            assert_close(mean[name], truth[name], 2 * rounding(codec, dtype), scale)
        if name == "zero.weight":
            assert not mean[name].any()


@each(CODECS)
@half_and_single
def test_inputs_are_not_changed(codec: Codec, dtype: torch.dtype) -> None:
    world = World(codec, 2)
    for step in range(2):
        inputs: Sequence[Tensors] = world.inputs(step, dtype)
        if step == 1:  # adjacent memory, which a codec could alias
            inputs = [side_by_side(given) for given in inputs]
        before = [{name: t.clone() for name, t in given.items()} for given in inputs]
        for end in world.average(inputs, runner=in_place):
            end.own()
            end.finite()
            for t in end.mean.values():  # the caller may change the means
                t.zero_()
        assert all(same_bits(given, was) for given, was in zip(inputs, before, strict=True))


@each(CODECS)
@half_and_single
def test_reusing_the_input_gives_the_same_means(codec: Codec, dtype: torch.dtype) -> None:
    keeps, reuses = World(codec, 2), World(codec, 2, reuse=True)
    for step in range(3):
        inputs = [side_by_side(given) for given in keeps.inputs(step, dtype)]
        expected, got = keeps.average(inputs), reuses.average(inputs, runner=in_place)
        assert same_bits(got[0].mean, got[1].mean)
        if codec not in FUSED:
            assert same_bits(got[0].mean, expected[0].mean)
            continue
        for name in set(inputs[0]) - RANK_DEFICIENT:
            # The products of `Batched` mix all tensors, so a rounding error is relative to the largest of them.
            mixed = [name] if codec in TENSOR_BY_TENSOR else list(inputs[0])
            scale = torch.cat([given[each].flatten() for given in inputs for each in mixed])
            assert_close(got[0].mean[name], expected[0].mean[name], 64 * rounding(codec, dtype), scale)


@each(CODECS)
@half_and_single
def test_collectives_may_reduce_in_place(codec: Codec, dtype: torch.dtype) -> None:
    apart, over = World(codec, 2), World(codec, 2)
    for step in range(3):
        inputs = apart.inputs(step, dtype)
        for a, b in zip(apart.average(inputs), over.average(inputs, runner=in_place), strict=True):
            assert same_bits(a.mean, b.mean)
            assert same_bits(a.own(), b.own())
        assert all(same_bits(a, b) for a, b in zip(apart.states, over.states, strict=True))


@each([codec for codec in FEEDBACK if not isinstance(codec, Batched)])
@each_world
def test_sent_plus_residual_equals_the_sum_of_inputs(codec: Codec, workers: int, dtype: torch.dtype) -> None:
    world = World(codec, workers)
    names = carried(codec)
    sent: list[dict[str, Any]] = [dict.fromkeys(names, 0.0) for _ in range(workers)]
    truth: list[dict[str, Any]] = [dict.fromkeys(names, 0.0) for _ in range(workers)]
    size: dict[str, Any] = dict.fromkeys(names, 0.0)
    forgets = 1 - getattr(codec, "decay", 1.0)
    for step in range(12):
        for worker, state in enumerate(world.states if forgets else []):
            for name, residual in residuals(state).items():
                truth[worker][name] -= forgets * residual.double()
        inputs = world.inputs(step, dtype)
        for worker, end in enumerate(world.average(inputs)):
            subtracted = end.mean if subtracts(codec) == "mean" else end.own()
            for name, t in inputs[worker].items():
                sent[worker][name] += subtracted[name].double()
                truth[worker][name] += t.double()
                size[name] += t.double().abs()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for worker, state in enumerate(world.states):
        by_name = residuals(state)
        assert "square.weight" in by_name
        everything = torch.cat([torch.as_tensor(size[name]).reshape(-1) for name in names])
        for name, residual in by_name.items():
            scale = size[name] if codec in TENSOR_BY_TENSOR else everything
            assert residual.dtype == wide
            relative = (64 if codec in FEW_BITS else 8) * torch.finfo(wide).eps
            assert_close(sent[worker][name] + residual, truth[worker][name], relative, scale)


@each_path([codec for codec in FUSED if codec in TENSOR_BY_TENSOR])
def test_means_plus_mean_residuals_equal_the_true_mean(codec: Codec, reuse: bool) -> None:
    world = World(codec, 3, reuse)
    sent: dict[str, Any] = dict.fromkeys(carried(codec), 0.0)
    truth: dict[str, Any] = dict.fromkeys(carried(codec), 0.0)
    for step in range(8):
        inputs = world.inputs(step)
        for name, mean in world.average(inputs)[0].mean.items():
            sent[name] += mean.double()
            truth[name] += torch.stack([given[name].double() for given in inputs]).mean(0)
    mean_residual = true_mean([residuals(state) for state in world.states])
    assert "square.weight" in mean_residual
    for name in ("square.weight", "twin.weight", "odd.weight", "conv.weight"):
        assert_close(
            sent[name] + mean_residual[name], truth[name], 1e-5, torch.stack([sent[name], mean_residual[name]])
        )


def residual_norms(codec: Codec, reuse: bool, steps: int) -> list[float]:
    """Return the norm of worker 0's residual after each step, on data that differs between workers."""
    world = World(codec, 2, reuse)
    shapes = {"w": (24, 20), **({"b": (7,)} if codec.accepts(torch.Size([7])) else {})}
    generator = torch.Generator().manual_seed(len(repr(codec)))
    constant = [{n: torch.randn(s, generator=generator) for n, s in shapes.items()} for _ in range(2)]
    norms = []
    for _ in range(steps):
        noise = [{n: torch.randn(s, generator=generator) for n, s in shapes.items()} for _ in range(2)]
        world.average([{n: a[n] + b[n] for n in shapes} for a, b in zip(constant, noise, strict=True)])
        norms.append(math.sqrt(sum(float(r.square().sum()) for r in residuals(world.states[0]).values())))
    return norms


@each_path(FEEDBACK)
def test_residuals_are_bounded_unless_the_mean_is_subtracted(codec: Codec, reuse: bool) -> None:
    norms = residual_norms(codec, reuse, 300)
    early, late = max(norms[:100]), max(norms[200:])
    if codec == ErrorFeedback(Exact()):
        assert early == late == 0
    elif subtracts(codec) == "own":
        assert 0 < late < 1.5 * early
    else:
        assert late > 2.5 * early  # linear growth: three times as much after three times as many steps


@each(CODECS)
@half_and_single
def test_planned_bytes_equal_the_recorded_bytes(codec: Codec, dtype: torch.dtype) -> None:
    world, plan, state = World(codec, 3), Ledger(), State()
    for step in range(2):
        inputs = world.inputs(step, dtype)
        world.average(inputs)
        meta = {name: torch.empty_like(t, device="meta") for name, t in inputs[0].items()}
        dry(codec.average(meta, state, Peers(0, 3)), plan, 3, phase="test")
    assert list(plan.entries) == list(world.ledger.entries)
    assert plan.payload_bytes > 0
    assert not any(entry.payload_bytes == 0 for entry in plan.entries)  # no collective of an empty tensor


@each([codec for codec in CODECS if codec not in FEW_BITS])
@pytest.mark.parametrize("workers", [2, 3])
def test_equal_inputs_give_the_result_of_one_worker(codec: Codec, workers: int) -> None:
    many, alone = World(codec, workers), World(codec, 1)
    for step in range(3):
        inputs = alone.inputs(step)
        expected = alone.average(inputs)[0]
        for end in many.average(inputs * workers):
            assert same_bits(end.mean, expected.mean)
            assert same_bits(end.own(), expected.own())


@each([codec for codec in CODECS if "fp16" not in repr(codec)])
@pytest.mark.parametrize("scale", [2.0**-67, 2.0**67], ids=["1e-20", "1e20"])
def test_the_scale_of_the_input_does_not_matter(codec: Codec, scale: float) -> None:
    world, scaled = World(codec, 3), World(codec, 3)
    for step in range(4):
        inputs = [{name: t.contiguous() for name, t in given.items()} for given in world.inputs(step)]
        expected = world.average(inputs)
        got = scaled.average([{name: t * scale for name, t in given.items()} for given in inputs])
        for a, b in zip(got, expected, strict=True):
            assert bool(a.finite())
            for name in b.mean:  # a power of two changes only the exponent
                assert torch.equal(a.mean[name], b.mean[name] * scale)


def decaying(seed: int, workers: int) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Return different matrices for each worker whose mean has singular values 1, 1/2, 1/4, ..., and this mean."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(24, 24, generator=generator, dtype=torch.float64)).Q for _ in range(2))
    mean = u @ torch.diag(2.0 ** -torch.arange(24.0, dtype=torch.float64)) @ v.T
    apart = torch.randn(workers, 24, 24, generator=generator, dtype=torch.float64)
    return [{"square.weight": mean + each} for each in apart - apart.mean(0)], mean


def low_rank_of(codec: Codec) -> LowRank:
    inner = codec.codec if isinstance(codec, (ByShape, ErrorFeedback)) else codec
    if isinstance(inner, ErrorFeedback):
        inner = inner.codec
    assert isinstance(inner, LowRank)
    return inner


@each(WARM)
@pytest.mark.parametrize("workers", [1, 4])
def test_a_warm_start_converges_to_the_best_approximation(codec: Codec, workers: int) -> None:
    inputs, mean = decaying(workers, workers)
    rank = low_rank_of(codec).rank
    u, s, vt = torch.linalg.svd(mean)
    best = u[:, :rank] @ torch.diag(s[:rank]) @ vt[:rank]
    world = World(codec, workers)
    errors = [float((world.average(inputs)[0].mean["square.weight"] - mean).norm()) for _ in range(40)]
    assert errors[0] > 1.02 * float((best - mean).norm())
    assert errors[-1] == pytest.approx(float((best - mean).norm()), rel=1e-6)
    torch.testing.assert_close(world.average(inputs)[0].mean["square.weight"], best, rtol=0, atol=1e-5)


@each(COLD)
def test_a_cold_start_draws_new_factors_at_every_call(codec: Codec) -> None:
    inputs, _ = decaying(0, 2)
    world = World(codec, 2)
    means = [world.average(inputs)[0].mean["square.weight"] for _ in range(6)]
    states = [dict(leaves(state)) for state in world.states]
    assert all(not torch.allclose(a, b, rtol=1e-3) for a, b in pairwise(means))
    assert not any("q" in path for state in states for path in state)


@each(PLAIN_LOW_RANK)
def test_matrices_within_the_rank_are_exact(codec: Codec) -> None:
    world = World(codec, 1)
    inputs = world.inputs("fixed")
    world.average(inputs)  # alternating rounds need one call for each factor
    mean = world.average(inputs)[0].mean
    for name in ("deficient.weight", "zero.weight", "one_row.weight"):
        assert_close(mean[name], inputs[0][name], 1e-5)
