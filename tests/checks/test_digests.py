"""Digests change with the bits and the places of a tensor's elements, and with nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import laconic
from laconic.checks.digests import digest

TABLE = 8 * 1024
MIX = -7046029254386353131
SIZES = [1, 3, 7, 8, 9, 16, 64, 1000, TABLE - 1, TABLE, TABLE + 8, 2 * TABLE, 2 * TABLE + 13, 300 * TABLE]
"""In bytes: below a word, words, below a table, rows of a table, a table with a rest, more than one block of rows."""


def _random_bytes(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _differ(a: Tensor, b: Tensor) -> bool:
    return bool(digest(a) != digest(b))


@pytest.mark.parametrize("size", SIZES)
def test_the_complement_has_another_digest(size):
    for seed in range(20):
        data = _random_bytes(size, seed)
        assert _differ(data, ~data), "all words"
        one = data.clone()
        one[size // 16 * 8 : size // 16 * 8 + 8] ^= 255
        assert _differ(data, one), "one word"


@pytest.mark.parametrize("size", SIZES)
def test_a_word_whose_product_is_the_complement_has_another_digest(size):
    """Words are multiplied by odd numbers. An arithmetic shift would map a product and its complement alike."""
    words = _random_bytes(size // 8 * 8 or 8).view(torch.int64)
    for index in {0, len(words) // 2, len(words) - 1}:
        table, place = len(words) // 1024 * 1024, index % 1024 if index < len(words) // 1024 * 1024 else None
        factor = ((index - table if place is None else place) + 1) * MIX | 1
        other = words.clone()
        product = ~(int(words[index]) * factor) * pow(factor, -1, 1 << 64) % (1 << 64)
        other[index] = product - (1 << 64) if product >> 63 else product
        assert _differ(words, other)


@given(st.sampled_from(SIZES), st.sets(st.integers(0, 8 * 300 * TABLE), min_size=1, max_size=12), st.integers(0, 9))
@settings(deadline=None)
def test_any_flipped_bits_change_the_digest(size, bits, seed):
    data = _random_bytes(size, seed)
    flipped = data.clone()
    for bit in {bit % (8 * size) for bit in bits}:
        flipped[bit // 8] ^= 1 << bit % 8
    assert _differ(data, flipped)


@given(st.integers(0, 1), st.integers(2, 299), st.integers(0, 510), st.integers(511, 1023), st.integers(0, 63))
@settings(deadline=None, max_examples=30)
def test_four_flips_at_the_corners_of_a_rectangle_change_it(top, bottom, left, right, bit):
    """Sums of rows and columns of the words themselves would miss these."""
    words = _random_bytes(300 * TABLE).view(torch.int64).view(-1, 1024)
    flipped = words.clone()
    for row in (top, bottom):
        for column in (left, right):
            flipped[row, column] ^= -(1 << 63) if bit == 63 else 1 << bit
    assert _differ(words, flipped)
    swapped = words.clone()
    swapped[bottom, left], swapped[bottom, right] = words[top, right], words[top, left]
    mirrored = swapped.clone()
    for row in (top, bottom):
        mirrored[row, left], mirrored[row, right] = swapped[row, right].item(), swapped[row, left].item()
    assert _differ(swapped, mirrored)


@given(st.integers(0, 510), st.integers(511, 1023), st.integers(0, 63), st.integers(0, 9))
@settings(deadline=None, max_examples=100)
@example(0, 512, 63, 0)
def test_two_flips_of_the_same_bit_in_a_row_change_it(left, right, bit, seed):
    """A bit at the top of a word must not be lost in a sum, where another one undoes it."""
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (2, 1024), generator=torch.Generator().manual_seed(seed))
    flipped = words.clone()
    flipped[1, [left, right]] ^= -(1 << 63) if bit == 63 else 1 << bit
    assert _differ(words, flipped)


def test_the_signs_of_any_two_elements_change_it():
    x = torch.randn(2048, generator=torch.Generator().manual_seed(0))
    for i, j in itertools.combinations(range(1, 64, 2), 2):
        y = x.clone()
        y[[i, j]] *= -1
        assert _differ(x, y), (i, j)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_negated_tensor_has_another_digest(dtype):
    for rows in (1, 2, 256):
        x = torch.randn(rows * TABLE // dtype.itemsize, generator=torch.Generator().manual_seed(rows)).to(dtype)
        assert _differ(x, -x)


@pytest.mark.parametrize(
    "t",
    [
        torch.ones(3)[::3],
        torch.ones(()).expand(1),
        torch.ones(1).as_strided((1, 1), (5, 7)),
        torch.ones(7, dtype=torch.bool)[::7],
        torch.ones(5, dtype=torch.complex64)[::5].conj(),
        torch.ones(4, 4).t()[::2],
        torch.ones(3).expand(2, 3),
        torch.ones(0, 3)[:, ::2],
    ],
    ids=lambda t: f"{list(t.shape)}, strides {list(t.stride())}",
)
def test_strides_do_not_matter(t):
    assert bool(digest(t) == digest(t.clone(memory_format=torch.contiguous_format).resolve_conj()))


def test_a_parameter_of_one_element_and_any_stride_is_attached():
    model = nn.Module()
    model.register_parameter("gain", nn.Parameter(torch.ones(3)[::3]))
    with laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters())) as session:
        assert session.parameters["gain"].stride() == (3,)
