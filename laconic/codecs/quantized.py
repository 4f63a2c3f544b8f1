"""Quantized: every number in 8, 4, 2 or 1 bits. The messages are rows of few bits: one scale a row, then the codes.

    messages = encode_rows(rows, bits=4)                    # [rows, width] in uint8
    decode_rows(messages, bits=4, count=128, dtype=torch.float32)

A row is decoded as (code − zero) · step. With 8 and 4 bits the step comes from the largest magnitude, and zero stays
zero. With 2 bits and 1 bit it comes from the mean magnitude, which loses least for bell-shaped rows: larger numbers are
cut, and the rest is left to error feedback. The step travels as bf16, which has the range of fp32.
A row with NaN or Inf is decoded as numbers that are not finite. Steps below 1e-38 count as zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.codecs.contract import accept_every_shape
from laconic.codecs.shards import Rows, reduce_in_shards
from laconic.exchange import Averaged, Decide, Exchange, Peers, State, Tensors
from laconic.kernels.choose import has_row_kernels
from laconic.packing import narrowed, wide_dtype
from laconic.values import as_code, is_whole

BITS = (8, 4, 2, 1)
SCALE_BYTES = 2
_BELOW_TINY = torch.finfo(torch.float32).tiny * (1 - 2**-7)
"""The largest step of a row, in bf16, that is taken for zero: the next one is 1.2e-38, as in fp32."""
_STEP_OF_MEAN = {1: 2.0, 2: 1.25}
"""The step in mean magnitudes: for 1 bit the best for any row; for 2 bits between the best for a normal distribution
(1.25), a uniform (1.0) and a Laplace distribution (1.54)."""


@dataclass(frozen=True, repr=False)
class Quantized:
    """Sends every number in `bits` bits, and a scale of 16 bits for each `block` of numbers.

    Bytes are bits / 32 of those of `Exact`, and 2 for each block, for any number of workers (`shards.py`). The result
    is biased, or with stochastic rounding noisy: wrap it in `ErrorFeedback`. A block never spans two tensors.

    >>> Quantized(bits=4)
    Quantized(bits=4)
    """

    bits: int
    block: int = 128
    rounding: Literal["nearest", "stochastic"] = "nearest"

    __repr__ = as_code
    accepts = accept_every_shape

    def __post_init__(self) -> None:
        check_bits("Quantized", self.bits, BITS)
        if not is_whole(self.block) or self.block % 8:
            raise ValueError(
                f"Quantized(block={self.block!r}): a block is a whole number of bytes for any bits: "
                "a multiple of 8 numbers, such as 128."
            )
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f'Quantized(rounding={self.rounding!r}): it must be "nearest" or "stochastic".')

    @property
    def row(self) -> int:
        """The numbers that share a scale."""
        return self.block

    def encode(self, rows: Tensor, counts: Tensor | None, keys: Tensor | None) -> Tensor:
        """Encode rows of numbers as messages."""
        if keys is None and has_row_kernels(rows, rows.dtype, self.block):
            from laconic.kernels.cuda import rows as kernels  # needs Triton

            return kernels.encode(rows, width(self.block, self.bits), self.bits, counts)
        noise = None if keys is None else uniform_noise(keys, self.block)
        return encode_rows(rows, self.bits, counts, noise)

    def encode_and_decode(self, rows: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Encode rows, to the nearest codes; return the messages, and the rows that they are decoded into."""
        if has_row_kernels(rows, rows.dtype, self.block):
            messages = self.encode(rows, counts, None)
            return messages, self.decode(messages, rows.dtype)
        messages, codes, step = _encoded(rows, self.bits, counts, None)
        return messages, codes.sub_(_zero(self.bits)).mul_(step.to(rows.dtype)[:, None])

    def decode(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode messages into rows of numbers."""
        if has_row_kernels(messages, dtype, self.block):
            from laconic.kernels.cuda import rows as kernels  # needs Triton

            return kernels.decode(messages, self.bits, self.block)
        return decode_rows(messages, self.bits, self.block, dtype)

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        """Average `tensors` in few bits."""
        turns: dict[str, int] = state.get("turn", {})
        turn = max((turns.get(name, 0) for name in tensors), default=0) if self.rounding == "stochastic" else None
        end = yield from averaged_in_rows(self, tensors, state, peers, turn)
        if turn is None:
            return end
        ok = yield Decide(end.finite())
        if ok.device.type != "cpu" or bool(ok):  # on an accelerator, to read it would wait for the device
            state.setdefault("turn", {}).update(dict.fromkeys(tensors, turn + 1))
        return Averaged(end.mean, end.own, lambda: ok, decided=True)


def check_bits(what: str, bits: object, allowed: tuple[int | None, ...]) -> None:
    """Raise a ValueError unless `bits` is one of `allowed`."""
    if bits not in allowed or isinstance(bits, bool):
        shown = ", ".join(str(each) for each in allowed)
        raise ValueError(f"{what}(bits={bits!r}): bits must be one of {shown}. To send all bits, use Exact().")


def averaged_in_rows(
    codec: Rows, tensors: Tensors, state: State, peers: Peers, turn: int | None = None
) -> Exchange[Averaged]:
    """Average tensors of any dtype through `reduce_in_shards`."""
    wide = {name: t.to(wide_dtype(t.dtype)) for name, t in tensors.items() if t.numel()}
    reduced = yield from reduce_in_shards(wide, codec, state, peers, turn)

    def shaped(found: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: narrowed(found[name], t.dtype) if t.numel() else t.clone() for name, t in tensors.items()}

    mean = {name: t.clone() if t is tensors[name] else t for name, t in shaped(reduced.mean).items()}
    return Averaged(mean, lambda: shaped(reduced.own()), reduced.finite)  # of the wide mean: a narrow one may overflow


def width(count: int, bits: int) -> int:
    """Return the bytes of a row of `count` numbers.

    >>> width(128, bits=4), width(128, bits=1)
    (66, 18)
    """
    return SCALE_BYTES + -(-count * bits // 8)


def encode_rows(rows: Tensor, bits: int, counts: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
    """Encode rows [n, count] of float32 or float64.

    `counts` says how many numbers of each row are not padding. `noise` between −½ and ½ makes rounding stochastic: the
    largest magnitude then sets the step, so that nothing is cut.
    """
    return _encoded(rows, bits, counts, noise)[0]


def _encoded(rows: Tensor, bits: int, counts: Tensor | None, noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return messages, the code of each number in the dtype of the rows, and the step of each row in bf16."""
    magnitudes = rows.abs()
    step = _steps(magnitudes, bits, counts, stochastic=noise is not None)
    divisors = torch.threshold(step.to(rows.dtype), 0.0, 1.0)[:, None]  # rows of zeros are divided by 1
    codes = torch.div(rows, divisors, out=magnitudes).add_(_zero(bits))
    if noise is not None:
        codes += noise
    codes.round_().nan_to_num_(_lowest(bits))
    if bits <= 2 or noise is not None:
        codes.clamp_(_lowest(bits), 2**bits - 1)  # else the step is at most 1/256 too small, which is less than a code
    # On a CPU, straight to uint8 takes four times as long as either.
    narrow = codes.to(torch.int16).to(torch.uint8) if bits == 8 else codes.to(torch.int8)
    messages = torch.cat([step[:, None].view(torch.uint8), pack_bits(narrow, bits)], dim=1)
    return messages, codes, step


def scales(messages: Tensor) -> Tensor:
    """Return the bf16 number [..., 1] that each message [..., width] begins with."""
    offsets = (messages.storage_offset(), messages.shape[-1], *messages.stride()[:-1])
    if messages.stride(-1) == 1 and not any(offset % SCALE_BYTES for offset in offsets):
        return messages.view(torch.bfloat16)[..., :1]
    # `contiguous()` keeps the strides of an empty shard, and no view of another dtype fits them.
    return messages[..., :SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)


def decode_rows(messages: Tensor, bits: int, count: int, dtype: torch.dtype) -> Tensor:
    """Decode messages [..., width] into rows [..., count]."""
    step = scales(messages).to(dtype)
    codes = unpack_bits(messages[..., SCALE_BYTES:], bits, count)
    if bits == 4:  # bytes are four times as quick as numbers of 32 bits
        return codes.view(torch.int8).sub_(8).to(dtype).mul_(step)
    return codes.to(dtype).sub_(_zero(bits)).mul_(step)


def _steps(magnitudes: Tensor, bits: int, counts: Tensor | None, stochastic: bool) -> Tensor:
    """Return the step of each row in bf16; zero for rows of zeros. The magnitudes may be overwritten."""
    if stochastic or bits > 2:
        step = magnitudes.amax(1).div_(2**bits - 1 - _zero(bits))
    else:
        fill = magnitudes.shape[1] if counts is None else counts.to(magnitudes.dtype)[:, None]
        step = magnitudes.div_(fill).sum(1).mul_(_STEP_OF_MEAN[bits])
    return torch.threshold(step.to(torch.bfloat16), _BELOW_TINY, 0.0)


def _zero(bits: int) -> float:
    """Return the code that stands for zero; with 2 bits and 1 bit it is between two codes."""
    return 2.0 ** (bits - 1) if bits > 2 else (2**bits - 1) / 2


def _lowest(bits: int) -> float:
    return 1.0 if bits > 2 else 0.0  # as many codes below zero as above


_WORDS = {4: torch.int16, 2: torch.int32, 1: torch.int64}
"""The dtype that has one byte for each code of a packed byte, the first of them the lowest (little endian)."""


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [n, count] in bytes, each below 2**bits, into uint8, the first in the lowest bits. `bits` divides 8.

    >>> pack_bits(torch.tensor([[1, 2, 3]], dtype=torch.uint8), bits=4)
    tensor([[33,  3]], dtype=torch.uint8)
    """
    if bits == 8:
        return codes
    each = 8 // bits
    if codes.shape[1] % each:
        codes = F.pad(codes, (0, -codes.shape[1] % each))
    words = codes.view(_WORDS[bits])  # [n, bytes]: the codes of one byte, each in a byte of its own
    for halving in range(each.bit_length() - 1):  # neighbours, then pairs of them, ...
        words = words | words >> ((8 - bits) << halving)
    return words.to(torch.uint8)  # the lowest byte


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo `pack_bits`: [..., bytes] to codes [..., count].

    >>> unpack_bits(torch.tensor([[33, 3]], dtype=torch.uint8), bits=4, count=3)
    tensor([[1, 2, 3]], dtype=torch.uint8)
    """
    if bits == 8:
        return packed
    each = 8 // bits
    words = packed.to(_WORDS[bits], memory_format=torch.contiguous_format)
    for halving in reversed(range(each.bit_length() - 1)):
        words = words | words << ((8 - bits) << halving)
    codes = words.view(torch.uint8).bitwise_and_(2**bits - 1)
    return codes if codes.shape[-1] == count else codes[..., :count]


def pack_indices(indices: Tensor, bits: int) -> Tensor:
    """Pack indices [n, count], each below 2**bits, into bytes [n, ceil(count · bits / 8)]."""
    places = torch.arange(bits, device=indices.device)
    return pack_bits(((indices[..., None] >> places) & 1).to(torch.uint8).flatten(1), bits=1)


def unpack_indices(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo `pack_indices`.

    >>> unpack_indices(pack_indices(torch.tensor([[4095, 7]]), bits=12), bits=12, count=2)
    tensor([[4095,    7]])
    """
    ones = unpack_bits(packed, 1, count * bits).unflatten(-1, (count, bits))
    places = torch.arange(bits, device=packed.device)
    return torch.bitwise_left_shift(ones.long(), places).sum(-1)


def uniform_noise(keys: Tensor, count: int) -> Tensor:
    """Return noise between −½ and ½, [len(keys), count] in float32, that depends on the integer keys alone."""
    z = (keys[:, None] * 1_000_003 + torch.arange(count, device=keys.device)) * 0x1E3779B97F4A7C15
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):  # the mixer of SplitMix64
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((z >> 40) & 0xFFFFFF).float() / (1 << 24) - 0.5
