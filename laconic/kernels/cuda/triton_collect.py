"""Many small tensors to and from one flat one, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

SIZE = 1024


@triton.jit(do_not_specialize=["count"])
def move(
    tiles, count, addresses, sizes, flat, good,
    GATHER: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr, SPOIL: tl.constexpr,
):  # fmt: skip
    """Copy one stretch of one tensor to its place in `flat`, or back; with SPOIL as NaN unless `good`."""
    tile = tl.program_id(0)
    i = tl.load(tiles + tile)
    at = tl.load(tiles + count + tile) + tl.arange(0, SIZE)
    place = tl.load(tiles + 2 * count + tile) + tl.arange(0, SIZE)
    inside = at < tl.load(sizes + i)
    tensor = tl.load(addresses + i).to(tl.pointer_type(KIND))
    if GATHER:
        tl.store(flat + place, tl.load(tensor + at, mask=inside), mask=inside)
    else:
        value = tl.load(flat + place, mask=inside)
        if SPOIL:
            value += tl.where(tl.load(good) > 0, 0.0, float("nan"))
        tl.store(tensor + at, value, mask=inside)
