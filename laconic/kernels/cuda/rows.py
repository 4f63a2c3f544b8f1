"""Rows in few bits on CUDA: the host side of `triton_rows` and `triton_sparse` for plain rows and messages."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic.kernels.cuda import triton_rows, triton_sparse


def rows_a_program(block: int) -> int:
    """Return how many rows one program processes."""
    return max(1, triton_rows.NUMBERS_A_TILE // block)


def words_of(messages: Tensor) -> Tensor:
    """Return messages in uint8 as words of 16 bits."""
    return messages.contiguous().view(torch.int16)


def encode(rows: Tensor, width: int, bits: int, counts: Tensor | None) -> Tensor:
    """Encode rows [n, block] of fp32 as messages [n, width], as `Quantized.encode` does, in one launch."""
    n, block = rows.shape
    messages = torch.empty(n, width, dtype=torch.uint8, device=rows.device)
    if n:
        each = rows_a_program(block)
        rows = rows.contiguous()
        triton_rows.encode_rows[(-(-n // each),)](
            rows, rows if counts is None else counts, messages.view(torch.int16), n,
            BITS=bits, BLOCK=block, ROWS=each, PADDED=counts is not None,
        )  # fmt: skip
    return messages


def decode(messages: Tensor, bits: int, block: int) -> Tensor:
    """Decode messages [..., bytes] into rows [..., block] of fp32, in one launch."""
    rows = torch.empty(*messages.shape[:-1], block, device=messages.device)
    n = rows.numel() // block
    if n:
        each = rows_a_program(block)
        triton_rows.decode_rows[(-(-n // each),)](words_of(messages), rows, n, BITS=bits, BLOCK=block, ROWS=each)
    return rows


def encode_largest(rows: Tensor, kept: int, values_bytes: int, bits: int | None) -> Tensor:
    """Encode the `kept` largest numbers of each row of fp32, and their places, as `TopK.encode` does."""
    n, chunk = rows.shape
    place_bits = chunk.bit_length() - 1
    messages = torch.empty(n, values_bytes + -(-kept * place_bits // 8), dtype=torch.uint8, device=rows.device)
    if n:
        padded = 1 << (kept - 1).bit_length()
        scratch = max(padded, chunk // 32)
        found = torch.empty(2, n, scratch, dtype=torch.int32, device=rows.device)
        triton_sparse.encode_largest[(n,)](
            rows.contiguous(), found[0], found[1], messages, messages.shape[1],
            KEPT=kept, PADDED=padded, CHUNK=chunk, PLACE_BITS=place_bits, TWO_BITS=bits is not None,
            SCRATCH=scratch, GUESS=0.8 * math.log(chunk / kept), AIM=math.log2(kept + 0.5), num_warps=4,
        )  # fmt: skip
    return messages


def decode_largest(messages: Tensor, kept: int, chunk: int, bits: int | None) -> Tensor:
    """Decode messages [..., bytes] into rows [..., chunk] of fp32, with zeros between the numbers."""
    messages = messages.contiguous()
    rows = torch.empty(*messages.shape[:-1], chunk, device=messages.device)
    n = rows.numel() // chunk
    if n:
        triton_sparse.decode_largest[(n,)](
            messages, rows, messages.shape[-1],
            KEPT=kept, PADDED=1 << (kept - 1).bit_length(), CHUNK=chunk, PLACE_BITS=chunk.bit_length() - 1,
            TWO_BITS=bits is not None, num_warps=4,
        )  # fmt: skip
    return rows
