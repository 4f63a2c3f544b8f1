"""Quantized: every number in 8, 4, 2 or 1 bits; Sign: its sign alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from laconic.codecs import few_bits
from laconic.codecs.contract import accept_every_shape, narrowed, wide_dtype
from laconic.codecs.shards import Rows, reduce_in_shards
from laconic.exchange import Averaged, Decide, Exchange, Peers, State, Tensors, all_finite
from laconic.kernels.choose import can_decode, can_encode
from laconic.values import as_code, is_whole

BITS = (8, 4, 2, 1)


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
        if keys is None and can_encode(rows, self.block):
            from laconic.kernels.cuda import rows as kernels  # needs Triton

            return kernels.encode(rows, self.bits, counts)
        noise = None if keys is None else few_bits.uniform_noise(keys, self.block)
        return few_bits.encode(rows, self.bits, counts, noise)

    def decode(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode messages into rows of numbers."""
        if can_decode(messages, dtype, self.block):
            from laconic.kernels.cuda import rows as kernels  # needs Triton

            return kernels.decode(messages, self.bits, self.block)
        return few_bits.decode(messages, self.bits, self.block, dtype)

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


@dataclass(frozen=True, repr=False)
class Sign:
    """Sends the sign of every number, and the mean magnitude of each `block`: 1 bit, as in EF-signSGD (1901.09847)."""

    block: int = 4096

    __repr__ = as_code
    accepts = accept_every_shape

    def __post_init__(self) -> None:
        if not is_whole(self.block) or self.block % 8:
            raise ValueError(f"Sign(block={self.block!r}): a block is a multiple of 8 numbers, such as 4096.")

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        """Average the signs of `tensors`, scaled, and send the sign of that."""
        return Quantized(1, self.block).average(tensors, state, peers, reuse=reuse)


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
    finite = reduced.mean  # which is fp32: the narrow dtype may overflow
    return Averaged(mean, lambda: shaped(reduced.own()), lambda: all_finite(finite))
