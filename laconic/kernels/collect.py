"""Many small CUDA tensors, such as a bucket's biases, as one: the host side of `triton_collect`."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from laconic.kernels import triton_collect as kernels
from laconic.wires.wire import Tensors

KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}


class Collection:
    """Contiguous tensors of one dtype, gathered into a flat tensor and scattered back."""

    def __init__(self, tensors: Tensors) -> None:
        some = next(iter(tensors.values()))
        self.device, self.dtype = some.device, some.dtype
        self.numels = [t.numel() for t in tensors.values()]
        places, offset = [], 0
        for i, numel in enumerate(self.numels):
            places += [(i, first, offset + first) for first in range(0, numel, kernels.SIZE)]
            offset += numel
        self.numel = offset
        self.count = len(places)
        self.tiles = torch.tensor(places, dtype=torch.int32).t().contiguous().to(self.device)
        self.counts = torch.tensor(self.numels, dtype=torch.int32).to(self.device)
        self.known: list[int] = []
        self.addresses = self.counts

    def fits(self, tensors: Tensors) -> bool:
        """Tell whether these are tensors of the same sizes and dtype."""
        return next(iter(tensors.values())).dtype == self.dtype and [t.numel() for t in tensors.values()] == self.numels

    def gather(self, tensors: Tensors) -> Tensor:
        """Copy the tensors side by side into a new flat one."""
        now = [t.data_ptr() for t in tensors.values()]
        if now != self.known:
            self.known = now
            self.addresses = torch.tensor(now, dtype=torch.int64).to(self.device)
        flat = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        self._move(flat, gather=True)
        return flat

    def scatter(self, flat: Tensor) -> None:
        """Copy the flat tensor back over those that were gathered last."""
        self._move(flat, gather=False)

    def _move(self, flat: Tensor, gather: bool) -> None:
        kernels.move[(self.count,)](
            self.tiles, self.count, self.addresses, self.counts, flat, GATHER=gather, KIND=KINDS[self.dtype],
            SIZE=kernels.SIZE,
        )  # fmt: skip
