"""Many small CUDA tensors, such as a bucket's biases, as one flat tensor: the host side of `triton_collect`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton.language as tl
from torch import Tensor

from laconic.exchange import Tensors
from laconic.kernels.cuda import triton_collect as kernels
from laconic.kernels.cuda.launches import Launch

KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}


class Collection:
    """Copies contiguous tensors of one dtype into one flat tensor, and back."""

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
        self.sizes = torch.tensor(self.numels, dtype=torch.int32).to(self.device)
        self.known: list[int] = []
        self.addresses = torch.zeros(len(self.numels), dtype=torch.int64, device=self.device)

    def fits(self, tensors: Tensors) -> bool:
        """Return whether these tensors have the same sizes and dtype."""
        return next(iter(tensors.values())).dtype == self.dtype and [t.numel() for t in tensors.values()] == self.numels

    def set_addresses(self, tensors: Iterable[Tensor]) -> None:
        """Update the table of addresses if they have changed."""
        now = [t.data_ptr() for t in tensors]
        if now != self.known:
            self.known = now
            self.addresses.copy_(torch.tensor(now, dtype=torch.int64))

    def gather(self, tensors: Tensors) -> Tensor:
        """Copy the tensors into a new flat tensor."""
        self.set_addresses(tensors.values())
        flat = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        self.launch(flat, gather=True).through_triton()
        return flat

    def scatter(self, flat: Tensor) -> None:
        """Copy the flat tensor back to the tensors that were gathered last."""
        self.launch(flat, gather=False).through_triton()

    def launch(self, flat: Tensor, gather: bool, finite: Tensor | None = None) -> Launch:
        """Return the launch that gathers, or scatters; with `finite`, it scatters NaN where the flag is zero."""
        arguments = {
            "tiles": self.tiles, "count": self.count, "addresses": self.addresses, "sizes": self.sizes, "flat": flat,
            "finite": self.sizes if finite is None else finite, "GATHER": gather, "KIND": KINDS[self.dtype],
            "SIZE": kernels.SIZE, "CHECKED": finite is not None,
        }  # fmt: skip
        return Launch(kernels.move, self.count, arguments, {})
