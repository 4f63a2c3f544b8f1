"""Exact and Cast: every number arrives, in its own bits or in half of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from laconic.codecs import Cast, ErrorFeedback, Exact
from laconic.comm.lockstep import lockstep
from laconic.comm.requests import Averaged, Mean
from laconic.ledger import Ledger


def test_half_the_bits_are_half_the_bytes() -> None:
    given = {"a": torch.ones(10), "b": torch.ones(3, 2)}
    for codec, size in ((Exact(), 64), (Cast("bf16"), 32), (Cast("fp16"), 32)):
        ledger = Ledger()
        lockstep([codec.average(given, {}) for _ in range(2)], ledger)
        assert (ledger.payload_bytes, ledger.collectives) == (size, 1)


@pytest.mark.parametrize(("to", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_mean_is_rounded_once_on_the_way_and_once_at_the_end(to: Any, dtype: torch.dtype) -> None:
    given = [{"x": torch.tensor([1.0, 1 / 3, 3.1])}, {"x": torch.tensor([2.0, 1 / 7, -9.9])}]
    codec = Cast(to)
    assert codec.dtype == dtype
    means = [end.mean["x"] for end in lockstep([codec.average(each, {}) for each in given])]
    rounded = torch.stack([each["x"].to(dtype) for each in given]).double().mean(0).to(dtype).float()
    assert torch.equal(means[0], rounded)
    assert torch.equal(means[1], rounded)


def test_what_fp16_cannot_hold_is_reported_and_not_owed() -> None:
    codec, state = ErrorFeedback(Cast("fp16")), dict[str, Any]()
    lockstep([codec.average({"x": torch.tensor([1 / 3])}, state)])
    owed = state["residual"]["x"].clone()
    (end,) = lockstep([codec.average({"x": torch.tensor([1e6])}, state)])
    assert not bool(end.finite())
    assert torch.equal(state["residual"]["x"], owed)


@pytest.mark.parametrize("wide", [False, True])
def test_exact_asks_once_for_a_mean_as_wide_as_told(wide: bool) -> None:
    exchange = Exact(wide=wide).average({"x": torch.ones(2)}, {})
    request = next(exchange)
    assert isinstance(request, Mean)
    assert request.wide is wide
    with pytest.raises(StopIteration) as end:
        exchange.send(request.x)
    assert isinstance(end.value.value, Averaged)


REPLICAS = [
    (workers, dtype)
    for workers in range(2, 8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
]


@pytest.mark.parametrize(("workers", "dtype"), REPLICAS, ids=str)
def test_equal_replicas_stay_bit_equal_when_summed_wide(workers: int, dtype: torch.dtype) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(workers), dtype=torch.float64).to(dtype)
    ends = lockstep([Exact(wide=True).average({"x": x}, {}) for _ in range(workers)])
    assert torch.equal(ends[0].mean["x"], x)


def test_the_own_part_is_gone_where_the_input_was_given_away() -> None:
    (end,) = lockstep([Exact().average({"x": torch.ones(2)}, {}, reuse=True)])
    with pytest.raises(RuntimeError, match=r"Exact: the own part was overwritten by the mean. Ask with reuse=False"):
        end.own()


@pytest.mark.parametrize("codec", [Exact(), Cast("bf16")], ids=repr)
def test_nothing_asks_for_nothing(codec: Exact | Cast) -> None:
    for given in ({}, {"none": torch.empty(0, 3)}):
        ledger = Ledger()
        (end,) = lockstep([codec.average(given, {})], ledger)
        assert list(end.mean) == list(given)
        assert bool(end.finite())
        assert ledger.collectives == 0


def test_large_but_finite_numbers_are_finite() -> None:
    (end,) = lockstep([Exact().average({"x": torch.full((4,), 1e38)}, {})])
    assert end.mean["x"].isfinite().all()
    assert bool(end.finite())


@pytest.mark.parametrize("to", ["int8", "float32", "", None, 16, ["bf16"]])
def test_cast_names_its_types(to: Any) -> None:
    with pytest.raises(ValueError) as error:
        Cast(to)
    assert str(error.value) == f'Cast({to!r}): the type must be "bf16" or "fp16". To send all bits, use Exact().'


@pytest.mark.parametrize("wide", ["yes", 3, None])
def test_exact_is_wide_or_not(wide: Any) -> None:
    with pytest.raises(ValueError, match=r"Exact\(wide=.*must"):
        Exact(wide=wide)
