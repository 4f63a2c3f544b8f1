"""TopDCT: its transform against sums of cosines, its places, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import laconic
from laconic.codecs import TopDCT
from laconic.codecs.cosines import pack_sorted, unpack_sorted
from tests.laws.world import averaged


def test_one_wave_is_one_coefficient() -> None:
    n = torch.arange(16, dtype=torch.float64)
    wave = torch.cos(math.pi * (2 * n[:, None] + 1) * 3 / 32) * torch.cos(math.pi * (2 * n + 1) * 5 / 32)
    flat = torch.full((16, 16), 0.25, dtype=torch.float64)
    given = {"w": torch.cat([wave, flat])}
    (end,) = averaged(TopDCT(1 / 256, chunk=16, bits=None), [given])  # one of 256 coefficients of each block
    torch.testing.assert_close(end.mean["w"], given["w"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (300,), (130, 70), (257, 257), (3, 500), (16, 8, 3, 3), (64, 1)])
def test_nearly_all_coefficients_are_nearly_the_tensor(shape: tuple[int, ...]) -> None:
    given = [{"w": torch.randn(shape, generator=torch.Generator().manual_seed(seed))} for seed in range(3)]
    mean = torch.stack([each["w"] for each in given]).mean(0)
    for end in averaged(TopDCT(0.99999, bits=None), given):
        torch.testing.assert_close(end.mean["w"], mean, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 7, 63, 64, 100, 4096])
def test_packed_places_are_found_again(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for count in {1, 2, size // 3 + 1, size} & set(range(size + 1)):
        places = torch.stack([torch.randperm(size, generator=generator)[:count].sort().values for _ in range(8)])
        places[0] = torch.arange(size - count, size)  # the last ones: the longest bitmap
        packed = pack_sorted(places, size)
        assert torch.equal(unpack_sorted(packed, size, count), places)
        anything = torch.randint(256, packed.shape, generator=generator, dtype=torch.uint8)
        assert set(unpack_sorted(anything, size, count).flatten().tolist()) <= set(range(size))
        assert packed.shape[1] <= math.ceil(count * (2 + math.log2(size / count)) / 8)


def test_bytes_do_not_grow_with_workers() -> None:
    shapes = {"w": (640, 640)}
    for workers in (2, 4, 20):
        dense = laconic.sent_bytes(laconic.ddp(), shapes, workers)
        sent = laconic.sent_bytes(laconic.demo(), shapes, workers)
        first = 2 + 62 + 109  # of 4096 coefficients: a scale, 123 values in 4 bits, 123 places
        means = 2 + 123 + 186  # twice as many
        assert sent == dense * (first + means) / (2 * 4 * 4096)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fraction": 1.0}, r"TopDCT\(fraction=1.0\): fraction must be between 0 and 1"),
        ({"fraction": "1/64"}, r"TopDCT\(fraction='1/64'\)"),
        ({"fraction": 0.1, "chunk": 1}, r"TopDCT\(chunk=1\): chunk must be a whole number from 2 to 256"),
        ({"fraction": 0.1, "bits": 1}, r"TopDCT\(bits=1\): bits must be one of None, 8, 4, 2"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TopDCT(**given)
