"""TopDCT: the largest DCT coefficients of each block of a tensor, with their places."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from laconic.codecs.contract import accept_every_shape
from laconic.codecs.quantized import check_bits, decode_rows, encode_rows, pack_bits, unpack_bits, width
from laconic.codecs.routing import average_parts
from laconic.codecs.shards import reduce_in_shards
from laconic.codecs.sparse import all_bits, decode_two_bits, encode_two_bits
from laconic.exchange import Averaged, Exchange, Peers, State, Tensors, all_finite
from laconic.packing import aligned, narrowed, wide_dtype
from laconic.values import as_code, is_number, is_whole

_MORE_MEANS = 2
"""How many means of a block are sent, in coefficients that each worker sends of it (docs/quality.md)."""


@dataclass(frozen=True, repr=False)
class TopDCT:
    """Sends the `fraction` of the DCT coefficients of each block that have the largest magnitudes, and their places.

    A matrix is cut into blocks of at most `chunk` x `chunk` numbers, a vector into chunks of at most `chunk`. Each is
    transformed by an orthonormal DCT-II, so one coefficient moves all weights of a block. Tensors of more dimensions
    count as matrices of their first one. At least one coefficient of each block is sent: small tensors are sent, too.
    A coefficient has `bits` (8, 4 or 2, or None for all 32) with one scale a block, and about 2 + log2(1 / fraction)
    bits for its place. Of the means, twice as many are sent: workers differ in what is largest. Bytes do not grow
    with the number of workers.

    For momentum: `ErrorFeedback(TopDCT(...), decay=0.999)` is what `demo` sends (DeMo, arXiv:2411.19870). It also
    encodes in a world of one, where the residual is the momentum, too.
    """

    fraction: float
    chunk: int = 64
    bits: int | None = 4

    __repr__ = as_code
    accepts = accept_every_shape

    def __post_init__(self) -> None:
        if not is_number(self.fraction) or not 0 < self.fraction < 1:
            raise ValueError(
                f"TopDCT(fraction={self.fraction!r}): fraction must be between 0 and 1, such as 0.03. "
                "To send all, use Exact()."
            )
        if not is_whole(self.chunk, least=2) or self.chunk > 256:
            raise ValueError(f"TopDCT(chunk={self.chunk!r}): chunk must be a whole number from 2 to 256, such as 64.")
        check_bits("TopDCT", self.bits, (None, 8, 4, 2))

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        """Average the largest coefficients of `tensors`, and send the largest of the means."""
        layouts = {name: _Layout.of(t.shape, self.chunk) for name, t in tensors.items() if t.numel()}
        # 1. the coefficients, those of blocks of one size together
        coefficients: dict[int, dict[str, Tensor]] = {}
        for name, layout in layouts.items():
            wide = tensors[name].to(wide_dtype(tensors[name].dtype))
            coefficients.setdefault(layout.row, {})[name] = layout.transform(wide)
        # 2. their means
        every = {name: x for some in coefficients.values() for name, x in some.items()}
        parts = [
            (f"blocks of {row}", _Largest(row, math.ceil(self.fraction * row - 1e-9), self.bits), some)
            for row, some in coefficients.items()
        ]
        end = yield from average_parts(every, parts, state, peers, reuse=reuse)

        # 3. back
        def shaped(found: Tensors) -> dict[str, Tensor]:
            return {
                name: narrowed(layouts[name].invert(found[name]), t.dtype) if name in layouts else t.clone()
                for name, t in tensors.items()
            }

        return Averaged(shaped(end.mean), lambda: shaped(end.own()), end.finite)


@dataclass(frozen=True)
class _Largest:
    """Sends the `kept` largest numbers of each row, with their places. For tensors [rows, row] of a wide dtype."""

    row: int
    kept: int
    bits: int | None

    accepts = accept_every_shape

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        """Average the largest numbers of each row; in a world of one, encode and decode them."""
        if peers.size == 1:
            found = {name: self._decoded(x) for name, x in tensors.items()}
            return Averaged(found, lambda: found, lambda: all_finite(found))
        of_means = replace(self, kept=min(self.row, _MORE_MEANS * self.kept))
        return (yield from reduce_in_shards(tensors, self, state, peers, of_means=of_means))

    def _decoded(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x, None, None), x.dtype)

    def encode(self, rows: Tensor, counts: Tensor | None, keys: Tensor | None) -> Tensor:
        """Encode rows: values, then places, in ascending order of places."""
        places = rows.abs().topk(self.kept, dim=1, sorted=False).indices.sort(1).values
        values = rows.gather(1, places)
        if self.bits is None:
            encoded = values.float().view(torch.uint8)
        elif self.bits == 2:
            encoded = encode_two_bits(values)
        else:
            encoded = encode_rows(values, self.bits)
        return torch.cat([encoded, pack_sorted(places, self.row)], dim=1)

    def decode(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode messages into rows, with zeros between the values."""
        size = 4 * self.kept if self.bits is None else width(self.kept, self.bits)
        encoded = messages[..., :size]
        if self.bits is None:
            values = all_bits(encoded).to(dtype)
        elif self.bits == 2:
            values = decode_two_bits(encoded, self.kept, dtype)
        else:
            values = decode_rows(encoded, self.bits, self.kept, dtype)
        places = unpack_sorted(messages[..., size:], self.row, self.kept)
        return values.new_zeros((*values.shape[:-1], self.row)).scatter_(-1, places, values)


@dataclass(frozen=True)
class _Layout:
    """How a tensor is cut into blocks: `rows` x `columns` of them, each of `height` x `width` numbers."""

    shape: torch.Size
    rows: int
    height: int
    columns: int
    width: int

    @classmethod
    def of(cls, shape: torch.Size, chunk: int) -> _Layout:
        """Cut each side into as few blocks as can be, of one size; the last may contain zeros that are not sent."""
        tall = shape[0] if len(shape) > 1 else 1
        wide = shape.numel() // tall
        rows, columns = -(-tall // chunk), -(-wide // chunk)
        return cls(shape, rows, -(-tall // rows), columns, -(-wide // columns))

    @property
    def row(self) -> int:
        """The numbers in a block."""
        return self.height * self.width

    @property
    def _matrix(self) -> tuple[int, int]:
        tall = self.shape[0] if len(self.shape) > 1 else 1
        return tall, self.shape.numel() // tall

    def transform(self, t: Tensor) -> Tensor:
        """Return the DCT coefficients of all blocks: [blocks, numbers of a block]."""
        tall, wide = self._matrix
        edges = (0, self.columns * self.width - wide, 0, self.rows * self.height - tall)
        whole = torch.nn.functional.pad(t.reshape(tall, wide), edges)
        blocks = whole.view(self.rows, self.height, self.columns, self.width).transpose(1, 2)
        blocks = aligned(blocks.reshape(-1, self.height, self.width))
        return (dct(self.height, t.dtype, t.device) @ (blocks @ dct(self.width, t.dtype, t.device).T)).flatten(1)

    def invert(self, coefficients: Tensor) -> Tensor:
        """Undo `transform`."""
        tall, wide = self._matrix
        dtype, device = coefficients.dtype, coefficients.device
        blocks = aligned(coefficients.reshape(-1, self.height, self.width))
        blocks = dct(self.height, dtype, device).T @ (blocks @ dct(self.width, dtype, device))
        whole = blocks.view(self.rows, self.columns, self.height, self.width).transpose(1, 2)
        return whole.reshape(self.rows * self.height, -1)[:tall, :wide].reshape(self.shape)


@lru_cache(maxsize=256)
def dct(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the orthonormal DCT-II as a matrix: a row for each frequency.

    >>> d = dct(8, torch.float64, torch.device("cpu"))
    >>> torch.allclose(d @ d.T, torch.eye(8, dtype=torch.float64))
    True
    """
    n = torch.arange(size, dtype=torch.float64)
    angles = (2 * n + 1) * n[:, None] * (math.pi / (2 * size))
    matrix = angles.cos() * math.sqrt(2 / size)
    matrix[0] = math.sqrt(1 / size)
    matrix[matrix.abs() < 1e-12] = 0
    return matrix.to(device, dtype)


def pack_sorted(places: Tensor, size: int) -> Tensor:
    """Pack ascending places [n, count], each below `size`, into bytes (Elias-Fano).

    The lower bits of each place as they are, then the upper ones as a bitmap: place i sets bit i + upper. So a place
    takes about 2 + log2(size / count) bits instead of log2(size).

    >>> pack_sorted(torch.tensor([[3, 64, 65, 4095]]), size=4096).shape
    torch.Size([1, 6])
    """
    count = places.shape[1]
    low, length = _split(size, count)
    lower = ((places[..., None] >> torch.arange(low, device=places.device)) & 1).to(torch.uint8).flatten(1)
    upper = places.new_zeros((len(places), length), dtype=torch.uint8)
    upper.scatter_(1, (places >> low) + torch.arange(count, device=places.device), 1)
    return pack_bits(torch.cat([lower, upper], dim=1), bits=1)


def unpack_sorted(packed: Tensor, size: int, count: int) -> Tensor:
    """Undo `pack_sorted`.

    >>> unpack_sorted(pack_sorted(torch.tensor([[3, 64, 65, 4095]]), size=4096), size=4096, count=4)
    tensor([[   3,   64,   65, 4095]])
    """
    low, length = _split(size, count)
    bits = unpack_bits(packed, 1, count * low + length)
    lower = bits[..., : count * low].unflatten(-1, (count, low)).long()
    lower = (lower << torch.arange(low, device=packed.device)).sum(-1)
    ones = bits[..., count * low :].sort(dim=-1, descending=True, stable=True).indices[..., :count]
    places: Tensor = ((ones - torch.arange(count, device=packed.device)) << low) + lower
    return places.clamp_(0, size - 1)  # a dry run decodes memory that nobody has written


def _split(size: int, count: int) -> tuple[int, int]:
    """Return how many lower bits of each place are sent as they are, and the length of the bitmap of the others."""
    low = (size // count).bit_length() - 1
    return low, count + ((size - 1) >> low)
