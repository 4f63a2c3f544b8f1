"""TopK: the largest numbers of each chunk, with their places."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.codecs.quantized import (
    SCALE_BYTES,
    averaged_in_rows,
    check_bits,
    pack_bits,
    pack_indices,
    scales,
    unpack_bits,
    unpack_indices,
    width,
)
from laconic.exchange import Averaged, Exchange, Peers, State, Tensors
from laconic.kernels.choose import has_row_kernels
from laconic.values import as_code, is_number, is_whole

_LEVELS, _SPLIT = (0.92, 1.32), 1.12
"""The two magnitudes that 2 bits stand for, and the border between them, in mean magnitudes of the numbers sent. These
lie beyond a threshold, where a bell-shaped distribution falls about exponentially."""


@dataclass(frozen=True, repr=False)
class TopK:
    """Sends the `fraction` of each `chunk` of numbers with the largest magnitudes, and where they are.

    A place in a chunk of 4096 takes 12 bits, a value 32, or `bits` (2) with one scale a chunk. The means are cut to the
    same fraction again, so bytes do not grow with the number of workers. Tensors smaller than a chunk are declined.
    The result is biased: wrap it in `ErrorFeedback`. Under Adam, sparse *gradients* lose the training; sparse deltas
    (`sparse_loco`) do not (docs/quality.md).

    >>> TopK(0.03).kept
    123
    """

    fraction: float
    chunk: int = 4096
    bits: int | None = None

    __repr__ = as_code

    def __post_init__(self) -> None:
        if not is_number(self.fraction) or not 0 < self.fraction < 1:
            raise ValueError(
                f"TopK(fraction={self.fraction!r}): fraction must be between 0 and 1, such as 0.03. "
                "To send all, use Exact()."
            )
        if not is_whole(self.chunk) or self.chunk & (self.chunk - 1) or not 8 <= self.chunk <= 1 << 16:
            raise ValueError(f"TopK(chunk={self.chunk!r}): chunk must be a power of 2 from 8 to 65536.")
        check_bits("TopK", self.bits, (None, 2))

    def accepts(self, shape: torch.Size) -> bool:
        """Accept tensors of at least one chunk."""
        return shape.numel() >= self.chunk

    @property
    def row(self) -> int:
        """The numbers in a chunk."""
        return self.chunk

    @property
    def kept(self) -> int:
        """How many numbers of a chunk are sent."""
        return math.ceil(self.fraction * self.chunk - 1e-9)

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        """Average the largest numbers of `tensors`, and send the largest of these means."""
        for name, t in tensors.items():
            if t.numel() and not self.accepts(t.shape):
                raise ValueError(
                    f"{self} was given {name!r} of {t.numel()} numbers: it accepts at least {self.chunk}. "
                    f"Wrap it in ByShape({self}), which sends everything else exactly."
                )
        return (yield from averaged_in_rows(self, tensors, state, peers))

    def encode(self, rows: Tensor, counts: Tensor | None, keys: Tensor | None) -> Tensor:
        """Encode chunks: values, then places, in ascending order of places."""
        if has_row_kernels(rows, rows.dtype, self.chunk, least=256):
            from laconic.kernels.cuda.rows import encode_largest  # needs Triton

            return encode_largest(rows, self.kept, self.values_bytes, self.bits)
        places = rows.abs().topk(self.kept, dim=1, sorted=False).indices.sort(1).values
        values = rows.gather(1, places)
        encoded = values.float().view(torch.uint8) if self.bits is None else encode_two_bits(values)
        return torch.cat([encoded, pack_indices(places, self._place_bits)], dim=1)

    def decode(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode messages into chunks, with zeros between the values."""
        if has_row_kernels(messages, dtype, self.chunk, least=256):
            from laconic.kernels.cuda.rows import decode_largest  # needs Triton

            return decode_largest(messages, self.kept, self.chunk, self.bits)
        size = self.values_bytes
        encoded = messages[..., :size]
        values = all_bits(encoded).to(dtype) if self.bits is None else decode_two_bits(encoded, self.kept, dtype)
        places = unpack_indices(messages[..., size:], self._place_bits, self.kept)
        return values.new_zeros((*values.shape[:-1], self.chunk)).scatter_(-1, places, values)

    @property
    def values_bytes(self) -> int:
        """The bytes of a chunk's values in a message; its places follow."""
        return 4 * self.kept if self.bits is None else width(self.kept, self.bits)

    @property
    def _place_bits(self) -> int:
        return self.chunk.bit_length() - 1


def all_bits(encoded: Tensor) -> Tensor:
    """Read the bytes of fp32 numbers: [..., 4 * count] to [..., count]."""
    # `contiguous()` keeps the strides of a single row, and no view of another dtype fits them.
    return encoded.clone(memory_format=torch.contiguous_format).view(torch.float32)


def encode_two_bits(values: Tensor) -> Tensor:
    """Encode the largest numbers of each chunk, [n, count]: their mean magnitude, signs, and one of two levels."""
    mean = values.abs().mean(1, keepdim=True).to(torch.bfloat16)
    codes = (values > 0).to(torch.uint8) + 2 * (values.abs() > _SPLIT * mean).to(torch.uint8)
    return torch.cat([mean.view(torch.uint8), pack_bits(codes, bits=2)], dim=1)


def decode_two_bits(encoded: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Undo `encode_two_bits`: [..., bytes] to [..., count]."""
    mean = scales(encoded).to(dtype)
    codes = unpack_bits(encoded[..., SCALE_BYTES:], 2, count)
    return torch.where(codes > 1, mean * _LEVELS[1], mean * _LEVELS[0]) * ((codes & 1).to(dtype) * 2 - 1)
