"""Hooks that send 8 bits per element, in one collective for each bucket. The twin of torch's module."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from laconic.algorithms.ddp_comm_hooks.engine import average_once
from laconic.codecs.contract import accept_every_shape
from laconic.exchange import Averaged, Exchange, Gather, Peers, State, Tensors, all_finite, true
from laconic.packing import pack, unpack
from laconic.torch_private.distributed import GradBucket
from laconic.values import as_code

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]


def quantization_pertensor_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average each bucket in 8 bits per element, with one scale for the bucket."""
    return average_once(EightBits(block=None), process_group, bucket)


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> Future[Tensor]:
    """Average each bucket in 8 bits per element, with one scale for every `bucket_size` elements."""
    return average_once(EightBits(block=bucket_size), process_group, bucket)


@dataclass(frozen=True, repr=False)
class EightBits:
    """Quantizes every number to 8 bits between the minimum and maximum of its block; all_gather, then mean in fp32.

    A block is `block` consecutive numbers, or the whole bucket for None. Its scale and zero point are sent in the same
    message. Zero is represented exactly. all_gather sends (workers − 1) messages: beyond 8 workers, an all_reduce in
    bf16 sends less.
    """

    block: int | None = 512

    __repr__ = as_code
    accepts = accept_every_shape

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 1:
            raise ValueError(f"EightBits(block={self.block}): a block has at least 1 number. For one block, use None.")

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        """Gather every worker's message and average the decoded numbers."""
        flat = pack(tensors)
        if not flat.numel():
            return Averaged({name: t.clone() for name, t in tensors.items()}, lambda: dict(tensors), true)
        message = self._encode(flat)
        messages = yield Gather(message)
        parts = [self._decode(each, flat) for each in messages]
        mean = parts[0] + torch.stack([part - parts[0] for part in parts]).mean(0)  # equal inputs stay bit-equal

        def shaped(x: Tensor) -> dict[str, Tensor]:
            return {name: t.to(tensors[name].dtype) for name, t in unpack(x, like=tensors).items()}

        return Averaged(shaped(mean), lambda: shaped(self._decode(message, flat)), lambda: all_finite({"": mean}))

    def _encode(self, flat: Tensor) -> Tensor:
        """Return one uint8 message: scale and zero point of each block, then the codes."""
        rows = self._rows(flat.float())  # [blocks, block]
        low = rows.amin(1).clamp(max=0.0)
        high = rows.amax(1).clamp(min=0.0)
        scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).tiny)
        zero = (-low / scale).round()
        codes = (rows / scale[:, None] + zero[:, None]).round().clamp(0, 255).to(torch.uint8)
        ends = torch.stack([scale, zero]).view(torch.uint8)
        return torch.cat([ends.reshape(-1), codes.reshape(-1)])

    def _decode(self, message: Tensor, like: Tensor) -> Tensor:
        blocks = self._blocks(like.numel())
        ends = message[: 8 * blocks].clone().view(torch.float32).view(2, blocks)
        codes = message[8 * blocks :].view(blocks, -1)
        return ((codes.float() - ends[1][:, None]) * ends[0][:, None]).reshape(-1)[: like.numel()]

    def _rows(self, flat: Tensor) -> Tensor:
        blocks = self._blocks(flat.numel())
        width = flat.numel() if self.block is None else self.block
        padded = flat.new_zeros(blocks * width)
        padded[: flat.numel()] = flat
        return padded.view(blocks, width)

    def _blocks(self, numel: int) -> int:
        return 1 if self.block is None else -(-numel // self.block)
