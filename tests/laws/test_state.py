"""Laws of a codec's state, over the list `CODECS`: resuming, layouts of buckets, non-finite steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.comm.lockstep import lockstep
from laconic.exchange import Peers, Tensors
from tests.laws.codecs import (
    CODECS,
    RANK_DEFICIENT,
    TENSOR_BY_TENSOR,
    assert_close,
    case,
    each,
    each_path,
    half_and_single,
    rounding,
    run,
)
from tests.laws.world import World, at_once, carried, leaves, same_bits


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
            at_once([codec.average({n: given[n] for n in bucket}, state, Peers(worker, 2)) for bucket in buckets])
            for worker, (given, state) in enumerate(zip(inputs, together.states, strict=True))
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
        for name in [n for n in ("square.weight", "bias") if n in carried(codec)]:
            yield case(codec, f"{name}-{codec}", name)


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
