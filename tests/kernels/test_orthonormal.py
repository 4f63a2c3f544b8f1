"""Orthonormal columns for any finite input: QᵀQ = I, all finite, and the input's columns are in their span."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.kernels.orthonormal import orthonormal, orthonormal_all

SCALES = [1e-30, 1e-20, 1e-3, 1.0, 1e3, 1e20, 1e30]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_orthonormal(q: Tensor, x: Tensor) -> None:
    """Check all three properties; the span is checked for each column, relative to its norm."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    tolerance = 1e-12 if wide == torch.float64 else 1e-5
    assert q.shape == x.shape
    assert q.dtype == wide
    assert q.isfinite().all()
    q, x = q.double(), x.double()
    torch.testing.assert_close(
        q.mT @ q, torch.eye(q.shape[-1]).double().expand(*q.shape[:-2], -1, -1), rtol=0, atol=tolerance
    )
    missed = (x - q @ (q.mT @ x)).norm(dim=-2)
    assert (missed <= tolerance * x.norm(dim=-2)).all()


@st.composite
def thin_matrices(draw: st.DrawFn) -> Tensor:
    """Draw matrices with rank <= rows: columns are random, zero or copies of others, of any scale and dtype."""
    rows = draw(st.integers(1, 40))
    rank = draw(st.integers(1, min(rows, 8)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    scales = [scale for scale in SCALES if dtype != torch.float16 or 1e-3 <= scale <= 1e3]
    x = normal(rows, rank, seed=draw(st.integers(0, 2**32)), dtype=torch.float64)
    for column in range(rank):
        kind = draw(st.sampled_from(["random", "random", "zero", "copy", "one entry"]))
        if kind == "zero":
            x[:, column] = 0
        elif kind == "copy":
            x[:, column] = -2 * x[:, draw(st.integers(0, rank - 1))]
        elif kind == "one entry":
            x[1:, column] = 0
        x[:, column] *= draw(st.sampled_from(scales))
    largest = min(torch.finfo(dtype).max, 1e38)
    return x.clamp(-largest, largest).to(dtype)


@given(thin_matrices())
@settings(deadline=None, max_examples=200)
def test_any_matrix(x: Tensor) -> None:
    before = x.clone()
    assert_orthonormal(orthonormal(x), x)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("rows", "rank"), [(1, 1), (7, 1), (64, 1), (5, 5), (33, 4), (512, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_shapes_and_dtypes(rows: int, rank: int, dtype: torch.dtype) -> None:
    x = normal(rows, rank, dtype=dtype)
    assert_orthonormal(orthonormal(x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_zeros(rank: int, dtype: torch.dtype) -> None:
    assert_orthonormal(orthonormal(torch.zeros(6, rank, dtype=dtype)), torch.zeros(6, rank, dtype=dtype))


def test_every_column_the_same() -> None:
    x = normal(20, 1).expand(20, 4)
    assert_orthonormal(orthonormal(x), x)


@pytest.mark.parametrize(("first", "second"), list(product(SCALES, SCALES)))
def test_columns_of_very_different_size(first: float, second: float) -> None:
    x = normal(16, 2) * torch.tensor([first, second])
    assert_orthonormal(orthonormal(x), x)


def test_one_column_becomes_a_unit_vector() -> None:
    x = normal(9, 1)
    torch.testing.assert_close(orthonormal(x).abs(), (x / x.norm()).abs())


@pytest.mark.parametrize("shape", [(5, 12, 3), (24, 7, 1), (2, 3, 8, 8), (1, 4, 2)])
def test_one_call_for_a_batch_equals_a_call_for_each(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    x[0] = 0  # a zero matrix among others
    each = torch.stack([orthonormal(one) for one in x.view(-1, *shape[-2:])]).view(shape)
    assert torch.equal(orthonormal(x), each)
    assert_orthonormal(orthonormal(x), x)


def test_many_names_keep_their_order_and_their_matrices() -> None:
    xs = {"b": normal(6, 2, seed=1), "a": normal(5, 2, seed=2), "c": normal(6, 2, seed=3), "zero": torch.zeros(6, 2)}
    done = orthonormal_all(xs)
    assert list(done) == list(xs)
    for name, x in xs.items():
        assert torch.equal(done[name], orthonormal(x))


def test_one_batched_call_for_all_of_a_shape_where_on_the_cpu_all_begin_at_a_cache_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[int, ...]] = []
    qr, geqrf = torch.linalg.qr, torch.geqrf

    def spy(x: Tensor) -> object:
        calls.append(tuple(x.shape))
        return geqrf(x) if x.device.type == "cpu" else qr(x)

    monkeypatch.setattr(torch.linalg, "qr", spy)
    monkeypatch.setattr(torch, "geqrf", spy)
    layers = {f"layer{i}": normal(6 + i % 2, 2, seed=i) for i in range(4)}
    orthonormal_all({name: x.to("meta") for name, x in layers.items()})
    assert sorted(calls) == [(2, 6, 2), (2, 7, 2)]
    calls.clear()
    orthonormal_all(layers)
    assert sorted(calls) == [(6, 2), (6, 2), (7, 2), (7, 2)]
    calls.clear()
    orthonormal_all({f"layer{i}": normal(16, 1 + i // 3, seed=i) for i in range(6)})
    assert sorted(calls) == [(3, 16, 1), (3, 16, 2)]


@pytest.mark.parametrize("shape", [(513, 2), (512, 2), (128, 7), (16, 1), (720, 32), (48, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_bits_do_not_depend_on_the_neighbours(shape: tuple[int, int], dtype: torch.dtype) -> None:
    xs = {f"layer{i}": normal(*shape, seed=i).to(dtype) * 1000.0 ** (i - 2) for i in range(5)} | {
        "zero": torch.zeros(shape, dtype=dtype)
    }
    for name, x in orthonormal_all(xs).items():
        assert torch.equal(x, orthonormal(xs[name]))


def test_empty_input() -> None:
    assert orthonormal_all({}) == {}
