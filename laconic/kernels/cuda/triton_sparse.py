"""The largest numbers of each chunk with their places (`laconic/codecs/sparse.py`), as Triton kernels.

One program holds a chunk in registers. It looks for a magnitude at or above which there are exactly k numbers, on the
bits of fp32, which are ordered as magnitudes are. It starts from what a bell-shaped distribution would need, and assumes
that counts fall exponentially between what it has tried; every third trial halves the interval instead. Of numbers with
equal magnitude, those at the lowest places are sent. Values and places are sent in ascending order of places.

What is sent is first marked in words of 32 bits, one a thread: most threads then have one number to copy, or none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.cuda.triton_rows import bf16_bits, bf16_value


@triton.jit
def _count(mask):
    return tl.sum(tl.sum(mask.to(tl.int32), axis=1), axis=0)


@triton.jit
def _threshold(magnitude, KEPT: tl.constexpr, CHUNK: tl.constexpr, GUESS: tl.constexpr, AIM: tl.constexpr):
    """Return bits at or above which there are KEPT, and KEPT; or the largest for which there are more, and how many.

    GUESS is where to start, in mean magnitudes. AIM is log2(KEPT + ½).
    """
    high = tl.minimum(tl.max(tl.max(magnitude, axis=1), axis=0), 0x7FFFFFFE) + 1  # a NaN may have all bits set
    low = high * 0
    above = low + CHUNK
    log_low, log_high = tl.log2(above.to(tl.float32)), low.to(tl.float32) - 1.0
    mean = tl.sum(tl.sum(magnitude.to(tl.float32, bitcast=True), axis=1), axis=0) / CHUNK
    guess = (mean * GUESS).to(tl.int32, bitcast=True)
    turn = low
    while (high - low > 1) & (above != KEPT):
        middle = tl.where(turn % 3 == 2, low + (high - low) // 2, tl.maximum(tl.minimum(guess, high - 1), low + 1))
        found = _count(magnitude >= middle)
        log_found = tl.log2(tl.maximum(found.to(tl.float32), 0.5))
        enough = found >= KEPT
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        log_low, log_high = tl.where(enough, log_found, log_low), tl.where(enough, log_high, log_found)
        above = tl.where(enough, found, above)
        left, right = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
        guess = (left + (right - left) * ((log_low - AIM) / (log_low - log_high))).to(tl.int32, bitcast=True)
        turn += 1
    return low, above


@triton.jit
def _end_of_equals(equal, place, equals, CHUNK: tl.constexpr):
    """Return the place before which there are so many `equals`."""
    low = equals * 0
    high = low + CHUNK
    while high - low > 1:
        middle = (low + high) // 2
        enough = _count(equal & (place < middle)) >= equals
        low, high = tl.where(enough, low, middle), tl.where(enough, middle, high)
    return high


@triton.jit
def _bits_set(word):
    """Return how many bits of a uint32 are set."""
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    halves = eights + (eights >> 8)
    return ((halves + (halves >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def encode_largest(
    rows, values, places, messages, width,
    KEPT: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, PLACE_BITS: tl.constexpr, TWO_BITS: tl.constexpr,
    SCRATCH: tl.constexpr, GUESS: tl.constexpr, AIM: tl.constexpr,
):  # fmt: skip
    """Encode one chunk. `values` and `places`, [n, SCRATCH] in int32, are scratch memory."""
    chunk = tl.program_id(0).to(tl.int64)
    WORDS: tl.constexpr = CHUNK // 32
    r = tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    place = r[:, None] * 32 + bit[None, :]
    rows += chunk * CHUNK
    values += chunk * SCRATCH
    places += chunk * SCRATCH
    magnitude = tl.load(rows + place).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    low, above = _threshold(magnitude, KEPT, CHUNK, GUESS, AIM)
    sent = magnitude >= low
    if above != KEPT:
        larger = magnitude > low
        equal = magnitude == low
        sent = larger | (equal & (place < _end_of_equals(equal, place, KEPT - _count(larger), CHUNK)))
    tl.store(values + r, tl.sum(sent.to(tl.int32) << bit[None, :], axis=1))
    tl.debug_barrier()
    word = tl.load(values + r).to(tl.uint32, bitcast=True)  # now one or two a thread
    tl.debug_barrier()
    count = _bits_set(word)
    slot = tl.cumsum(count, axis=0) - count
    for _ in range(tl.max(count, axis=0)):
        rest = word & (word - 1)
        lowest = (word ^ rest).to(tl.float32).to(tl.int32, bitcast=True)  # a power of 2: its exponent is the place
        at = r * 32 + ((lowest >> 23) - 127)
        there = word != 0
        tl.store(values + slot, tl.load(rows + at, mask=there, other=0.0).to(tl.int32, bitcast=True), mask=there)
        tl.store(places + slot, at, mask=there)
        slot += 1
        word = rest
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
