"""Copy many small tensors to one flat tensor, or back, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

SIZE = 1024


@triton.jit(do_not_specialize=["count"])
def move(
    tiles, count, addresses, sizes, flat, finite,
    GATHER: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Copy one block of a tensor to its position in `flat`, or back. With CHECKED, write NaN back unless `finite`."""
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
        if CHECKED:
            value += tl.where(tl.load(finite) > 0, 0.0, float("nan"))
        tl.store(tensor + at, value, mask=inside)
