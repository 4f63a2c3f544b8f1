"""Exact and Cast: every number is sent, in its own dtype or in half the bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from laconic.codecs import Cast, ErrorFeedback, Exact
from laconic.exchange import Averaged, Done, Mean, Peers, advance
from laconic.ledger import Ledger
from tests.laws.world import averaged


def test_half_the_bits_are_half_the_bytes() -> None:
    given = {"a": torch.ones(10), "b": torch.ones(3, 2)}
    for codec, size in ((Exact(), 64), (Cast("bf16"), 32), (Cast("fp16"), 32)):
        ledger = Ledger()
        averaged(codec, [given] * 2, ledger=ledger)
        assert (ledger.payload_bytes, ledger.collectives) == (size, 1)


@pytest.mark.parametrize(("to", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_inputs_are_rounded_before_the_mean_and_the_mean_once_more(to: Any, dtype: torch.dtype) -> None:
    given = [{"x": torch.tensor([1.0, 1 / 3, 3.1])}, {"x": torch.tensor([2.0, 1 / 7, -9.9])}]
    codec = Cast(to)
    assert codec.dtype == dtype
    means = [end.mean["x"] for end in averaged(codec, given)]
    rounded = torch.stack([each["x"].to(dtype) for each in given]).double().mean(0).to(dtype).float()
    assert torch.equal(means[0], rounded)
    assert torch.equal(means[1], rounded)


def test_fp16_overflow_is_reported_and_stays_out_of_the_residual() -> None:
    codec, state = ErrorFeedback(Cast("fp16")), dict[str, Any]()
    averaged(codec, [{"x": torch.tensor([1 / 3])}], [state])
    residual = state["residual"]["x"].clone()
    (end,) = averaged(codec, [{"x": torch.tensor([1e6])}], [state])
    assert not bool(end.finite())
    assert torch.equal(state["residual"]["x"], residual)


@pytest.mark.parametrize("wide", [False, True])
def test_exact_requests_one_mean_with_the_given_wide(wide: bool) -> None:
    exchange = Exact(wide=wide).average({"x": torch.ones(2)}, {}, Peers(0, 2))
    request = advance(exchange, None)
    assert isinstance(request, Mean)
    assert request.wide is wide
    end = advance(exchange, request.x)
    assert isinstance(end, Done)
    assert isinstance(end.result, Averaged)


REPLICAS = [
    (workers, dtype)
    for workers in range(2, 8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
]


@pytest.mark.parametrize(("workers", "dtype"), REPLICAS, ids=str)
def test_equal_replicas_stay_bit_equal_when_summed_wide(workers: int, dtype: torch.dtype) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(workers), dtype=torch.float64).to(dtype)
    ends = averaged(Exact(wide=True), [{"x": x}] * workers)
    assert torch.equal(ends[0].mean["x"], x)


@pytest.mark.parametrize("codec", [Exact(), Cast("bf16")], ids=repr)
def test_empty_input_needs_no_collective(codec: Exact | Cast) -> None:
    for given in ({}, {"none": torch.empty(0, 3)}):
        ledger = Ledger()
        (end,) = averaged(codec, [given], ledger=ledger)
        assert list(end.mean) == list(given)
        assert bool(end.finite())
        assert ledger.collectives == 0


def test_large_but_finite_numbers_are_finite() -> None:
    (end,) = averaged(Exact(), [{"x": torch.full((4,), 1e38)}])
    assert end.mean["x"].isfinite().all()
    assert bool(end.finite())


@pytest.mark.parametrize("to", ["int8", "float32", "", None, 16, ["bf16"]])
def test_cast_refuses_other_dtypes(to: Any) -> None:
    with pytest.raises(ValueError) as error:
        Cast(to)
    assert str(error.value) == f'Cast({to!r}): the type must be "bf16" or "fp16". To send all bits, use Exact().'


@pytest.mark.parametrize("wide", ["yes", 3, None])
def test_wide_must_be_a_bool(wide: Any) -> None:
    with pytest.raises(ValueError, match=r"Exact\(wide=.*must"):
        Exact(wide=wide)
