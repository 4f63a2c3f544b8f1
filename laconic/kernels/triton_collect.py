"""Many small tensors to and from one flat one, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

SIZE = 1024


@triton.jit
def move(tiles, stride, addresses, counts, flat, GATHER: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr):
    """Copy one stretch of one tensor to its place in `flat`, or back."""
    tile = tl.program_id(0)
    i = tl.load(tiles + tile)
    at = tl.load(tiles + stride + tile) + tl.arange(0, SIZE)
    place = tl.load(tiles + 2 * stride + tile) + tl.arange(0, SIZE)
    inside = at < tl.load(counts + i)
    tensor = tl.load(addresses + i).to(tl.pointer_type(KIND))
    if GATHER:
        tl.store(flat + place, tl.load(tensor + at, mask=inside), mask=inside)
    else:
        tl.store(tensor + at, tl.load(flat + place, mask=inside), mask=inside)
