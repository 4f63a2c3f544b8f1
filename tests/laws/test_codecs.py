"""Laws that every codec satisfies: one test for each law, over one list. To add a codec, add it to `CODECS`."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.codecs import Batched, ByShape, Cast, Codec, ErrorFeedback, Exact, LowRank
from laconic.comm.dry import dry
from laconic.comm.lockstep import lockstep
from laconic.comm.requests import Averaged, State, Tensors
from laconic.ledger import Ledger
from tests.laws.world import World, at_once, carried, in_place, leaves, residuals, same_bits, side_by_side, true_mean

QUICK: list[Codec] = [
    Exact(),
    Cast("bf16"),
    LowRank(rank=2, rounds="alternating"),
    ErrorFeedback(LowRank(rank=1)),
    ByShape(LowRank(rank=1)),
    ByShape(LowRank(rank=4, warm_start=False, seed=7)),
    ByShape(ErrorFeedback(LowRank(rank=2))),
    ByShape(ErrorFeedback(LowRank(rank=4, rounds="alternating", min_compression=0))),
    ByShape(ErrorFeedback(LowRank(rank=2, rounds="alternating")), rest=ErrorFeedback(Cast("fp16"))),
    ByShape(ErrorFeedback(LowRank(rank=2, rounds="alternating"), subtract="mean")),
    Batched(ErrorFeedback(LowRank(rank=1))),
]
"""One codec of each kind. The tests of all others are marked slow."""
CODECS: list[Codec] = [
    *QUICK,
    Exact(wide=True),
    Cast("fp16"),
    LowRank(rank=2),
    ErrorFeedback(Exact()),
    ErrorFeedback(Cast("bf16")),
    ErrorFeedback(Cast("fp16")),
    ErrorFeedback(LowRank(rank=2, rounds="alternating", min_compression=0)),
    ByShape(LowRank(rank=2)),
    ByShape(LowRank(rank=4, min_compression=0)),
    ByShape(LowRank(rank=1, rounds="alternating")),
    ByShape(LowRank(rank=4, rounds="alternating", min_compression=1)),
    ByShape(LowRank(rank=1, warm_start=False)),
    ByShape(ErrorFeedback(LowRank(rank=1))),
    ByShape(ErrorFeedback(LowRank(rank=4))),
    ByShape(ErrorFeedback(LowRank(rank=1, rounds="alternating"))),
    ByShape(ErrorFeedback(LowRank(rank=2, warm_start=False))),
    ByShape(ErrorFeedback(LowRank(rank=2)), rest=Cast("bf16")),
    ByShape(LowRank(rank=2), rest=Exact(wide=True)),
    ErrorFeedback(ByShape(LowRank(rank=1, rounds="alternating"), rest=Cast("bf16"))),
    ErrorFeedback(ByShape(LowRank(rank=2))),
    ErrorFeedback(LowRank(rank=2), subtract="mean"),
    Batched(LowRank(rank=2)),
    ErrorFeedback(Batched(LowRank(rank=4, rounds="alternating"))),
]
TENSOR_BY_TENSOR = [codec for codec in CODECS if "Batched" not in repr(codec)]
"""Codecs that encode each tensor by itself. `Batched` makes one matrix of all tensors."""
FEEDBACK = [codec for codec in CODECS if "ErrorFeedback" in repr(codec)]
PLAIN_LOW_RANK = [codec for codec in TENSOR_BY_TENSOR if "LowRank" in repr(codec) and codec not in FEEDBACK]
WARM = [codec for codec in PLAIN_LOW_RANK if "warm_start=False" not in repr(codec)]
FUSED = [codec for codec in CODECS if "ErrorFeedback(codec=LowRank" in repr(codec) and "subtract" not in repr(codec)]
"""Codecs with a fused path if the input may be overwritten; it equals the plain code up to rounding."""
COLD = [codec for codec in CODECS if "warm_start=False" in repr(codec)]

WORLDS = [(1, torch.float16), (2, torch.bfloat16), (3, torch.float64), (4, torch.float32)]
each_world = pytest.mark.parametrize(("workers", "dtype"), WORLDS, ids=lambda x: str(x).removeprefix("torch."))
half_and_single = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def each(codecs: Sequence[Codec]) -> pytest.MarkDecorator:
    """Test a law on each codec."""
    return pytest.mark.parametrize("codec", [_case(codec, repr(codec)) for codec in codecs])


def each_path(codecs: Sequence[Codec]) -> pytest.MarkDecorator:
    """Test a law on each codec, and also on the fused path of those that have one."""
    ways = [(codec, reuse) for codec in codecs for reuse in ([False, True] if codec in FUSED else [False])]
    cases = [_case(codec, f"{codec}{'-reuse' if reuse else ''}", reuse) for codec, reuse in ways]
    return pytest.mark.parametrize(("codec", "reuse"), cases)


def _case(codec: Codec, name: str, *values: object) -> Any:
    return pytest.param(codec, *values, id=name, marks=[] if codec in QUICK else [pytest.mark.slow])


RANK_DEFICIENT = {"deficient.weight", "one_row.weight"}
"""Matrices of lower rank than their factors: rounding decides how these are completed, so results may differ."""


def rounding(codec: Codec, dtype: torch.dtype) -> float:
    """Return the relative error of one rounding in the coarsest dtype involved."""
    coarse = {"bf16": torch.bfloat16, "fp16": torch.float16}
    types = [dtype, *(each for word, each in coarse.items() if word in repr(codec))]
    return max(torch.finfo(each).eps for each in types)


def subtracts(codec: Codec) -> str:
    return "mean" if "subtract='mean'" in repr(codec) else "own"


def assert_close(got: Tensor, expected: Tensor, relative: float, scale: Tensor | None = None) -> None:
    """Compare within `relative` of the largest magnitude: a zero tensor must be exactly zero."""
    largest = (expected if scale is None else scale).abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=relative * largest)


def run(world: World, steps: Sequence[object], dtype: torch.dtype = torch.float32) -> list[Averaged]:
    """Run several steps on new tensors and return the results of worker 0."""
    return [world.average(world.inputs(step, dtype))[0] for step in steps]


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


@each(TENSOR_BY_TENSOR)
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
            scale = torch.stack([given[name] for given in inputs])
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
    for step in range(12):
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
            assert_close(sent[worker][name] + residual, truth[worker][name], 8 * torch.finfo(wide).eps, scale)


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
        dry(codec.average(meta, state), plan, 3, phase="test")
    assert list(plan.entries) == list(world.ledger.entries)
    assert plan.payload_bytes > 0
    assert not any(entry.payload_bytes == 0 for entry in plan.entries)  # no collective of an empty tensor


@each_path(CODECS)
@half_and_single
def test_a_resumed_run_repeats_the_bits(codec: Codec, reuse: bool, dtype: torch.dtype) -> None:
    world = World(codec, 2, reuse)
    run(world, range(3), dtype)
    resumed = World(codec, 2, reuse, states=copy.deepcopy(world.states))
    for step in range(3, 6):
        inputs = world.inputs(step, dtype)
        for a, b in zip(world.average(inputs), resumed.average(inputs), strict=True):
            assert same_bits(a.mean, b.mean)
    assert all(same_bits(a, b) for a, b in zip(world.states, resumed.states, strict=True))


@each(TENSOR_BY_TENSOR)
def test_state_is_a_tree_of_dicts_keyed_by_parameter(codec: Codec) -> None:
    world = World(codec, 2)
    run(world, range(3))
    for state in world.states:
        for path, leaf in leaves(state):
            assert path[-1] in carried(codec)
            assert type(leaf) in (int, Tensor)
            assert not (isinstance(leaf, Tensor) and leaf.requires_grad)


@each(TENSOR_BY_TENSOR)
@half_and_single
def test_the_layout_of_buckets_does_not_matter(codec: Codec, dtype: torch.dtype) -> None:
    whole, split = World(codec, 2), World(codec, 2)
    names = carried(codec)
    for step in range(4):  # another layout at each step
        inputs = whole.inputs(step, dtype)
        expected = whole.average(inputs)[0]
        for bucket in (names[step :: step + 1], [name for name in names if name not in names[step :: step + 1]]):
            got = split.average([{name: given[name] for name in bucket} for given in inputs])[0]
            for name in bucket:
                assert_close(got.mean[name], expected.mean[name], 64 * rounding(codec, dtype), inputs[0][name])


@each(CODECS)
@half_and_single
def test_buckets_may_be_in_flight_at_once(codec: Codec, dtype: torch.dtype) -> None:
    alone, together = World(codec, 2), World(codec, 2)
    names = carried(codec)
    buckets = [names[:2], names[2:5], names[5:]]
    for step in range(3):
        inputs = alone.inputs(step, dtype)
        expected: dict[str, Tensor] = {}
        for bucket in buckets:
            expected |= alone.average([{name: given[name] for name in bucket} for given in inputs])[0].mean
        exchanges = [
            at_once([codec.average({name: given[name] for name in bucket}, state) for bucket in buckets])
            for given, state in zip(inputs, together.states, strict=True)
        ]
        assert same_bits(lockstep(exchanges)[0].mean, expected)
    assert all(same_bits(a, b) for a, b in zip(alone.states, together.states, strict=True))


def with_bad_number(inputs: Sequence[Tensors], bad: float, only: str | None = None) -> list[dict[str, Tensor]]:
    """Write one bad number on the last worker, into each tensor or only into one."""
    result = [dict(given) for given in inputs]
    for name, t in inputs[-1].items():
        if t.numel() and only in (None, name):
            flat = t.reshape(-1).clone()
            flat[flat.numel() // 2] = bad
            result[-1][name] = flat.view(t.shape)
    return result


@each_path(CODECS)
@pytest.mark.parametrize(
    ("bad", "good_steps"),  # alternating rounds send P after an even number of steps, Q after an odd one
    [(math.nan, 2), (math.inf, 3), pytest.param(-math.inf, 2, marks=pytest.mark.slow)],
)
def test_a_nonfinite_step_does_not_change_the_state(codec: Codec, reuse: bool, bad: float, good_steps: int) -> None:
    world = World(codec, 2, reuse)
    run(world, range(good_steps))
    before = copy.deepcopy(world.states)
    ends = world.average(with_bad_number(world.inputs("bad"), bad))
    assert not any(bool(end.finite()) for end in ends)
    assert all(same_bits(a, b) for a, b in zip(world.states, before, strict=True))
    fresh = World(codec, 2, reuse, states=before)
    for a, b in zip(run(world, range(10, 13)), run(fresh, range(10, 13)), strict=True):
        assert same_bits(a.mean, b.mean)
        assert all(t.isfinite().all() for t in a.mean.values())


def one_bad_tensor() -> Iterator[Any]:
    for codec in CODECS:
        for name in [each for each in ("square.weight", "bias") if each in carried(codec)]:
            yield _case(codec, f"{name}-{codec}", name)


@pytest.mark.parametrize(("codec", "name"), list(one_bad_tensor()))
def test_one_nonfinite_tensor_voids_the_whole_step(codec: Codec, name: str) -> None:
    world = World(codec, 2)
    run(world, range(2))
    before = copy.deepcopy(world.states)
    ends = world.average(with_bad_number(world.inputs("bad"), math.nan, only=name))
    assert not any(bool(end.finite()) for end in ends)
    assert all(same_bits(a, b) for a, b in zip(world.states, before, strict=True))


@each(CODECS)
def test_a_nonfinite_first_step_does_not_change_later_steps(codec: Codec) -> None:
    bad_first, fresh = World(codec, 2), World(codec, 2)
    bad_first.average(with_bad_number(fresh.inputs("bad"), math.nan))
    for a, b in zip(run(bad_first, range(4)), run(fresh, range(4)), strict=True):
        everything = torch.cat([t.reshape(-1) for t in b.mean.values()])
        for name in set(a.mean) - RANK_DEFICIENT:
            assert_close(a.mean[name], b.mean[name], 64 * rounding(codec, torch.float32), everything)


@each(CODECS)
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
