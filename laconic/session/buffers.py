"""Buffers of DDP models: the first worker's on all, after each step in which all workers averaged gradients.

DDP broadcasts buffers itself, before the next forward, on a group of its own: no timeout of ours applies to that wait,
and its bytes are not in the ledger. So a session takes it over. NaN and Inf do not spread: with its buffers, the first
worker sends a flag, whether they are finite; if they are not, all take those of the first worker whose buffers are.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from laconic.comm.averaging import write
from laconic.comm.queue import CollectiveQueue
from laconic.exchange import Exchange, First, all_finite
from laconic.packing import bucketed, pack, unpack
from laconic.session.model_state import ModelState, clean

logger = logging.getLogger(__name__)


class BufferSync:
    """Gives all workers the buffers of one, but for those that DDP was asked to ignore."""

    def __init__(self, model_state: ModelState, ignored: Collection[str]) -> None:
        self._model_state = model_state
        self._ignored = {f"buffer:{clean(name)}" for name in ignored}
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None
        """On a GPU: whether the last broadcast was finite, read a step later, so that no step waits for it."""

    def sync(self, queue: CollectiveQueue, step: int) -> None:
        """Broadcast from the first worker. All workers call it after the same step."""
        buckets = self._buckets()
        if queue.workers == 1 or not buckets:
            return
        if self._pending is not None:
            finite, ready = self._pending
            self._pending = None
            ready.synchronize()
            if not bool(finite):
                self._take_from_first_finite(queue, buckets, step - 1)
        finite = self._broadcast(queue, buckets, worker=0)
        if finite.is_cuda:
            host = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(finite, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
            self._pending = host, ready
        elif not bool(finite):
            self._take_from_first_finite(queue, buckets, step)

    def _take_from_first_finite(self, queue: CollectiveQueue, buckets: Sequence[dict[str, Tensor]], step: int) -> None:
        finite: list[bool] = queue.gather(self._finite(buckets).reshape(1)).flatten().tolist()
        text = f"step {step}: the buffers of worker 0 have NaN or Inf"
        if any(finite):
            logger.warning("%s. All workers take those of worker %d.", text, finite.index(True))
            self._broadcast(queue, buckets, finite.index(True))
        else:
            logger.warning("%s, and so have those of all others. All keep their own.", text)

    def _broadcast(self, queue: CollectiveQueue, buckets: Sequence[dict[str, Tensor]], worker: int) -> Tensor:
        """Take the buffers of `worker`, unless its flag is that they are not finite; return the flag."""
        flats = [pack(bucket) for bucket in buckets]
        finite = self._finite(buckets).reshape(1).to(queue.device)

        def exchange(index: int) -> Exchange[None]:
            message = flats[index].view(torch.uint8).to(queue.device)
            if index == 0:
                message = torch.cat([message, finite.view(torch.uint8)])
            got = yield First(message, worker)
            if index == 0:
                finite.copy_(got[-1:])
                got = got[:-1]
            flats[index] = got.view(flats[index].dtype).to(flats[index].device)

        queue.run_all([exchange(index) for index in range(len(buckets))], "buffers")
        for bucket, flat in zip(buckets, flats, strict=True):
            write(bucket, unpack(torch.where(finite.to(flat.device), flat, pack(bucket)), like=bucket))
        return finite

    def _finite(self, buckets: Sequence[dict[str, Tensor]]) -> Tensor:
        each = {name: b for bucket in buckets for name, b in bucket.items() if b.is_floating_point()}
        return all_finite({name: b for name, b in each.items() if name not in self._model_state.nonfinite_by_design})

    def _buckets(self) -> list[dict[str, Tensor]]:
        # `data`: as with DDP's own broadcast, autograd does not count it as a change of what a graph has saved.
        buffers = self._model_state.all_buffers
        return bucketed({name: b.data for name, b in buffers.items() if b.numel() and name not in self._ignored})
