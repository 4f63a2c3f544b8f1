"""The largest numbers of each chunk with their places (`laconic/codecs/sparse.py`), as Triton kernels.

One program holds a chunk in registers. It finds the magnitude of the k-th largest number by bisection on the bits of
fp32, which are ordered as the magnitudes are; most searches end early, at a threshold above which there are exactly k.
Numbers of equal magnitude are sent from the lowest place on. Values and places are sent in the order of places.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.cuda.triton_rows import bf16_bits, bf16_value


@triton.jit
def _threshold(magnitude, KEPT: tl.constexpr):
    """Return the largest found bits at or above which there are at least KEPT, and how many there are."""
    low, above = 0, KEPT + 1  # at or above zero there are all; the number does not matter unless it is KEPT
    high = tl.minimum(tl.max(magnitude, axis=0), 0x7FFFFFFE) + 1  # a NaN may have all bits set
    while (high - low > 1) & (above != KEPT):
        middle = low + (high - low) // 2
        found = tl.sum((magnitude >= middle).to(tl.int32), axis=0)
        if found >= KEPT:
            low, above = middle, found
        else:
            high = middle
    return low, above


@triton.jit
def encode_largest(
    rows, values, places, messages, width,
    KEPT: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, PLACE_BITS: tl.constexpr, TWO_BITS: tl.constexpr,
):  # fmt: skip
    """Encode one chunk. `values` and `places`, [n, PADDED] in int32, are scratch memory."""
    chunk = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, CHUNK)
    x = tl.load(rows + chunk * CHUNK + place)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    low, above = _threshold(magnitude, KEPT)
    values += chunk * PADDED
    places += chunk * PADDED
    if above == KEPT:
        sent = magnitude >= low
        slot = tl.cumsum(sent.to(tl.int32), axis=0) - 1
        tl.store(values + slot, bits, mask=sent)
        tl.store(places + slot, place, mask=sent)
    else:
        larger, equal = (magnitude > low).to(tl.int32), (magnitude == low).to(tl.int32)
        equals = KEPT - tl.sum(larger, axis=0)  # so many of the equal ones are sent
        before = tl.cumsum(equal, axis=0) - equal
        slot = tl.cumsum(larger, axis=0) - larger + tl.minimum(before, equals)
        sent = (larger > 0) | ((equal > 0) & (before < equals))
        tl.store(values + slot, bits, mask=sent)
        tl.store(places + slot, place, mask=sent)
    tl.debug_barrier()  # all threads see what was stored
    messages += chunk * width
    k = tl.arange(0, PADDED)
    value = tl.load(values + k, mask=k < KEPT, other=0)
    if TWO_BITS:
        messages = _store_two_bits(messages, values, value, k, KEPT, PADDED)
    else:
        for i in tl.static_range(4):
            tl.store(messages + 4 * k + i, ((value >> (8 * i)) & 0xFF).to(tl.uint8), mask=k < KEPT)
        messages += 4 * KEPT
    # A place has at least 8 bits, so a byte holds bits of one place, or of two.
    byte = tl.arange(0, 2 * PADDED)
    first, offset = byte * 8 // PLACE_BITS, byte * 8 % PLACE_BITS
    left = tl.load(places + first, mask=first < KEPT, other=0) >> offset
    right = tl.load(places + first + 1, mask=first + 1 < KEPT, other=0) << (PLACE_BITS - offset)
    used: tl.constexpr = (KEPT * PLACE_BITS + 7) // 8
    tl.store(messages + byte, ((left | right) & 0xFF).to(tl.uint8), mask=byte < used)


@triton.jit
def _store_two_bits(messages, values, value, k, KEPT: tl.constexpr, PADDED: tl.constexpr):
    """Store the mean magnitude and the codes; return the address after them."""
    mean = bf16_bits(tl.sum(tl.abs(value.to(tl.float32, bitcast=True)), axis=0) / KEPT)
    border = bf16_value(bf16_bits(bf16_value(mean) * 1.12))
    tl.store(messages, (mean & 0xFF).to(tl.uint8))
    tl.store(messages + 1, (mean >> 8).to(tl.uint8))
    byte = tl.arange(0, PADDED)
    packed = tl.zeros((PADDED,), dtype=tl.int32)
    for i in tl.static_range(4):
        each = tl.load(values + 4 * byte + i, mask=4 * byte + i < KEPT, other=0).to(tl.float32, bitcast=True)
        code = (each > 0).to(tl.int32) + 2 * (tl.abs(each) > border).to(tl.int32)
        packed |= tl.where(4 * byte + i < KEPT, code, 0) << (2 * i)
    used: tl.constexpr = (KEPT + 3) // 4
    tl.store(messages + 2 + byte, packed.to(tl.uint8), mask=byte < used)
    return messages + 2 + used


@triton.jit
def decode_largest(
    messages, rows, width,
    KEPT: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, PLACE_BITS: tl.constexpr, TWO_BITS: tl.constexpr,
):  # fmt: skip
    """Decode one chunk: zeros, then the values at their places."""
    chunk = tl.program_id(0).to(tl.int64)
    rows += chunk * CHUNK
    messages += chunk * width
    tl.store(rows + tl.arange(0, CHUNK), tl.zeros((CHUNK,), dtype=tl.float32))
    k = tl.arange(0, PADDED)
    inside = k < KEPT
    if TWO_BITS:
        mean = bf16_value(tl.load(messages).to(tl.int32) | (tl.load(messages + 1).to(tl.int32) << 8))
        code = tl.load(messages + 2 + k // 4, mask=inside, other=0).to(tl.int32) >> (2 * (k % 4))
        value = tl.where((code & 2) > 0, mean * 1.32, mean * 0.92) * ((code & 1) * 2 - 1).to(tl.float32)
        messages += 2 + (KEPT + 3) // 4
    else:
        bits = tl.zeros((PADDED,), dtype=tl.int32)
        for i in tl.static_range(4):
            bits |= tl.load(messages + 4 * k + i, mask=inside, other=0).to(tl.int32) << (8 * i)
        value = bits.to(tl.float32, bitcast=True)
        messages += 4 * KEPT
    used: tl.constexpr = (KEPT * PLACE_BITS + 7) // 8
    bit = k * PLACE_BITS
    place = tl.zeros((PADDED,), dtype=tl.int32)
    for i in tl.static_range(3):  # a place of up to 16 bits lies in three bytes at most
        byte = bit // 8 + i
        place |= tl.load(messages + byte, mask=inside & (byte < used), other=0).to(tl.int32) << (8 * i)
    place = (place >> (bit % 8)) & (CHUNK - 1)
    tl.debug_barrier()  # the zeros come first
    tl.store(rows + place, value, mask=inside)
