"""Rows of numbers in few bits (`laconic/codecs/quantized.py`), as Triton kernels.

    encode_rows, decode_rows      rows [n, BLOCK] in fp32, and messages [n, bytes]
    encode_tiles                  M = G + E of many tensors, straight into the messages for the owners of the rows
    average_tiles                 the means of the rows that this worker owns, and the messages about them
    finish_tiles                  G = mean;  E = M − own, or `own` itself

A block of numbers has the shape [ROWS, WORDS, EACH]: EACH codes make one word of 16 bits, which one thread packs. The
step of a row, in bf16, is the first word of its message. Divisions and roundings are those of the plain code, so 8 and 4
bits give the same bytes. With 2 bits and 1 bit the step comes from a sum, whose order differs: it may be one bf16 away.

A table of tiles gives each program its tensor and its first row. FAST tiles have full rows only, and their tensors start
at multiples of 16 bytes: then all accesses have 16 bytes. Nothing here waits for the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUMBERS_A_TILE = 2048


@triton.jit
def bf16_bits(x):
    """Return the bits of `x`, which is not negative, rounded to bf16; as an int32."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0)


@triton.jit
def bf16_value(word):
    """Return the fp32 of the bf16 in the lowest bits of an int32."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _encode(x, fill, BITS: tl.constexpr):
    """Return the steps of rows x [ROWS, WORDS, EACH], as bf16 bits [ROWS], and their codes [ROWS, WORDS].

    `fill` [ROWS] is how many numbers of a row are not padding; the padding is zeros.
    """
    EACH: tl.constexpr = 16 // BITS
    zero: tl.constexpr = 2.0 ** (BITS - 1) if BITS > 2 else (2.0**BITS - 1) / 2  # the code that stands for zero
    most: tl.constexpr = 2.0**BITS - 1
    if BITS > 2:
        # As integers: NaN is larger than Inf, so it is found.
        largest = tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2), axis=1)
        step = largest.to(tl.float32, bitcast=True)
        step = tl.div_rn(step, tl.zeros_like(step) + (most - zero))
    else:
        share = tl.div_rn(tl.abs(x), tl.broadcast_to(fill[:, None, None], x.shape))
        in_means: tl.constexpr = 1.25 if BITS == 2 else 2.0
        step = tl.sum(tl.sum(share, axis=2), axis=1) * in_means
    word = bf16_bits(step)
    word = tl.where(word < 0x80, 0, word)  # below the smallest normal number
    step = bf16_value(word)
    step = tl.where(step > 0, step, 1.0)
    scaled = tl.div_rn(x, tl.broadcast_to(step[:, None, None], x.shape)) + zero
    lowest: tl.constexpr = 1.0 if BITS > 2 else 0.0
    scaled = tl.where(scaled > lowest, tl.where(scaled < most, scaled, most), lowest)
    codes = (scaled + 12582912.0).to(tl.int32, bitcast=True) & 0xFF  # 1.5 · 2^23: the sum is rounded to a whole number
    shifts = tl.arange(0, EACH) * BITS
    return word, tl.sum(codes << shifts[None, None, :], axis=2)


@triton.jit
def _store_message(words, row, inside, step, codes, WORDS: tl.constexpr, MASKED: tl.constexpr):
    """Store messages as rows `row` of `words`, [n, 1 + WORDS] in int16."""
    at = words + row.to(tl.int64) * (1 + WORDS)
    w = tl.arange(0, WORDS)
    if MASKED:
        tl.store(at, step.to(tl.int16), mask=inside)
        tl.store(at[:, None] + 1 + w[None, :], codes.to(tl.int16), mask=inside[:, None])
    else:
        tl.store(at, step.to(tl.int16))
        tl.store(at[:, None] + 1 + w[None, :], codes.to(tl.int16))


@triton.jit
def _decode(words, row, inside, BITS: tl.constexpr, WORDS: tl.constexpr):
    """Decode messages into [ROWS, WORDS, EACH]; zeros where not `inside`."""
    EACH: tl.constexpr = 16 // BITS
    at = words + row.to(tl.int64) * (1 + WORDS)
    w = tl.arange(0, WORDS)
    step = bf16_value(tl.load(at, mask=inside, other=0).to(tl.int32))
    codes = tl.load(at[:, None] + 1 + w[None, :], mask=inside[:, None], other=0).to(tl.int32)
    shifts = tl.arange(0, EACH) * BITS
    codes = (codes[:, :, None] >> shifts[None, None, :]) & (2**BITS - 1)
    zero: tl.constexpr = 2.0 ** (BITS - 1) if BITS > 2 else (2.0**BITS - 1) / 2
    return (codes.to(tl.float32) - zero) * step[:, None, None]


@triton.jit
def _within_row(WORDS: tl.constexpr, EACH: tl.constexpr):
    return (tl.arange(0, WORDS)[:, None] * EACH + tl.arange(0, EACH)[None, :])[None, :, :]


@triton.jit(do_not_specialize=["n"])
def encode_rows(
    rows, fill, words, n,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Encode ROWS rows of BLOCK numbers. With PADDED, `fill` says how many numbers of each are not padding."""
    EACH: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = BLOCK // EACH
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    at = row.to(tl.int64)[:, None, None] * BLOCK + _within_row(WORDS, EACH)
    x = tl.load(rows + at, mask=inside[:, None, None], other=0.0)
    full = tl.full((ROWS,), BLOCK, tl.float32)
    if PADDED:
        full = tl.load(fill + row, mask=inside, other=1).to(tl.float32)
    step, codes = _encode(x, full, BITS)
    _store_message(words, row, inside, step, codes, WORDS, True)


@triton.jit(do_not_specialize=["n"])
def decode_rows(words, rows, n, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Decode ROWS messages."""
    EACH: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = BLOCK // EACH
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    at = row.to(tl.int64)[:, None, None] * BLOCK + _within_row(WORDS, EACH)
    tl.store(rows + at, _decode(words, row, inside, BITS, WORDS), mask=inside[:, None, None])


@triton.jit
def _tile(
    tiles, count, tensors, g_at, e_at, KIND: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FAST: tl.constexpr
):
    """Return a tile's G and E, its rows in them and among all rows, which of these exist, and the size of G."""
    tile = tl.program_id(0)
    i = tl.load(tiles + tile)
    first = tl.load(tiles + count + tile)
    numel, row_at = tl.load(tensors + 2 * i), tl.load(tensors + 2 * i + 1).to(tl.int32)
    g = tl.load(g_at + i).to(tl.pointer_type(KIND))
    e = tl.load(e_at + i).to(tl.pointer_type(tl.float32))
    if FAST:
        g, e = tl.multiple_of(g, 16), tl.multiple_of(e, 16)
    row = first + tl.arange(0, ROWS)
    return g, e, row, row_at + row, row.to(tl.int64) * BLOCK < numel, numel


@triton.jit
def _load(g, e, at, mask, FAST: tl.constexpr, ADD: tl.constexpr):
    """Return M = G + E, or G without ADD."""
    if FAST:
        x = tl.load(g + at).to(tl.float32)
        if ADD:
            x += tl.load(e + at)
    else:
        x = tl.load(g + at, mask=mask, other=0.0).to(tl.float32)
        if ADD:
            x += tl.load(e + at, mask=mask, other=0.0)
    return x


@triton.jit(do_not_specialize=["count"])
def encode_tiles(
    tiles, count, tensors, g_at, e_at, position, sent,
    KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FAST: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Encode M = G + E of one tile into the rows `position` of `sent`."""
    EACH: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = BLOCK // EACH
    g, e, row, whole_row, inside, numel = _tile(tiles, count, tensors, g_at, e_at, KIND, BLOCK, ROWS, FAST)
    at = row.to(tl.int64)[:, None, None] * BLOCK + _within_row(WORDS, EACH)
    x = _load(g, e, at, at < numel, FAST, ADD)
    fill = tl.maximum(tl.minimum(numel - row.to(tl.int64) * BLOCK, BLOCK), 1).to(tl.float32)
    step, codes = _encode(x, fill, BITS)
    to = tl.load(position + whole_row, mask=inside, other=0)
    _store_message(sent, to, inside, step, codes, WORDS, not FAST)


@triton.jit(do_not_specialize=["count", "worker", "workers", "start", "mine"])
def average_tiles(
    tiles, count, tensors, g_at, e_at, position, received, means, second, worker, workers, start, mine,
    KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FAST: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Average the rows of one tile that this worker owns: all messages, and its own numbers exactly."""
    EACH: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = BLOCK // EACH
    g, e, row, whole_row, inside, numel = _tile(tiles, count, tensors, g_at, e_at, KIND, BLOCK, ROWS, FAST)
    slot = tl.load(position + whole_row, mask=inside, other=-1) - start
    inside = (slot >= 0) & (slot < mine)
    within = _within_row(WORDS, EACH)
    at = row.to(tl.int64)[:, None, None] * BLOCK + within
    there = tl.broadcast_to(inside[:, None, None], (ROWS, WORDS, EACH))
    if not FAST:
        there = there & (at < numel)
    exact = _load(g, e, at, there, False, ADD)
    share = 1.0 / workers
    total = tl.zeros((ROWS, WORDS, EACH), dtype=tl.float32)
    message = slot.to(tl.int64)
    for other in range(workers):
        decoded = _decode(received, message, inside, BITS, WORDS)
        message += mine
        total += tl.where(other == worker, exact, decoded) * share
    total = tl.where(there, total, 0.0)  # the padding of the last row is zero
    fill = tl.maximum(tl.minimum(numel - row.to(tl.int64) * BLOCK, BLOCK), 1).to(tl.float32)
    step, codes = _encode(total, fill, BITS)
    _store_message(second, slot, inside, step, codes, WORDS, True)
    tl.store(means + slot.to(tl.int64)[:, None, None] * BLOCK + within, total, mask=inside[:, None, None])


@triton.jit(do_not_specialize=["rows"])
def check_steps(words, rows, finite, BITS: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr):
    """Clear the flag `finite` if one of SIZE messages stands for numbers that are not finite."""
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    step = bf16_value(tl.load(words + row.to(tl.int64) * (1 + WORDS), mask=row < rows, other=0).to(tl.int32))
    largest = step * (2.0 ** (BITS - 1) - 1 if BITS > 2 else (2.0**BITS - 1) / 2)
    if tl.max(tl.where(largest < float("inf"), 0, 1), axis=0) > 0:
        tl.store(finite, 0)


@triton.jit(do_not_specialize=["count", "workers", "start", "mine"])
def finish_tiles(
    tiles, count, tensors, g_at, e_at, position, gathered_at, sent, gathered, means, keep, workers, start, mine,
    KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FAST: tl.constexpr,
    ADD: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Write the mean of one tile over G, and over E what this worker's messages amount to if OWN.

    Else, if `keep`, write the new residual over E: M minus that. What G loses because its dtype is narrower goes into E.
    """
    EACH: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = BLOCK // EACH
    g, e, row, whole_row, inside, numel = _tile(tiles, count, tensors, g_at, e_at, KIND, BLOCK, ROWS, FAST)
    within = _within_row(WORDS, EACH)
    at = row.to(tl.int64)[:, None, None] * BLOCK + within
    there = at < numel
    at_sent = tl.load(position + whole_row, mask=inside, other=-1)
    slot = at_sent - start
    owned = (slot >= 0) & (slot < mine) & inside
    mean = _decode(gathered, tl.load(gathered_at + whole_row, mask=inside, other=0), inside, BITS, WORDS)
    own_mean = tl.load(means + slot.to(tl.int64)[:, None, None] * BLOCK + within, mask=owned[:, None, None], other=0.0)
    decoded = _decode(sent, at_sent, inside & (slot < 0) | inside & (slot >= mine), BITS, WORDS)
    lost = (own_mean - mean) * workers  # by the second encoding, for which the owner answers
    x = _load(g, e, at, there, FAST, ADD)
    if OWN:
        result = tl.where(owned[:, None, None], x - lost, decoded)
    else:
        result = tl.where(owned[:, None, None], lost, x - decoded)
    narrow = mean
    if KIND == tl.float16:  # noqa: SIM300
        cut = tl.minimum(tl.maximum(mean, -65504.0), 65504.0)
        narrow = tl.where(tl.abs(mean) < float("inf"), cut, mean)
    narrow = narrow.to(KIND)
    if KIND.primitive_bitwidth < 32:
        result += mean - narrow.to(tl.float32)
    if FAST:
        tl.store(g + at, narrow)
    else:
        tl.store(g + at, narrow, mask=there)
    if OWN:
        tl.store(e + at, result, mask=there)
    elif tl.load(keep) > 0:
        if FAST:
            tl.store(e + at, result)
        else:
            tl.store(e + at, result, mask=there)
