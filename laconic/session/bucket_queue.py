"""DDP's buckets in the order in which they become ready, and the layout that a resumed run repeats.

DDP rebuilds its buckets after the first backward, by the order in which gradients became ready. A resumed run starts
with the old layout once more. Where the layout decides the last bit (which sums share a message; what a batched codec
takes for one matrix), the first backward after loading waits until all buckets are ready, and averages them in
the layout that was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.futures import Future

from laconic.comm.queue import CollectiveQueue, new_future
from laconic.exchange import Averaged, Exchange
from laconic.session.model_state import ModelState, local_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

Average = Callable[[dict[str, Tensor]], Exchange[Averaged]]
"""Averages a bucket, and writes the means over it."""

TOGETHER_BYTES = 512 << 20
"""On CUDA, buckets are averaged together up to this size: launches cost more there than bytes."""


@dataclass(frozen=True, eq=False)
class _Bucket:
    tensors: dict[str, Tensor]
    flat: Tensor
    future: Future[Tensor]


@dataclass(frozen=True, eq=False)
class _Joined:
    parts: list[dict[str, Tensor]]
    whole: dict[str, Tensor]


@dataclass(eq=False)
class BucketQueue:
    """Submits exchanges for buckets, in order: one each, or one for several on CUDA."""

    queue: CollectiveQueue
    layout: list[list[str]] = field(default_factory=list)
    """Names by exchange, as of the last backward."""
    phase: str = "gradient"
    quiet: bool = False
    """Whether the caller looks for errors before the optimizer's step: DDP's backward cannot raise them as they are."""
    _next_layout: list[list[str]] = field(default_factory=list)
    _repeat: list[list[str]] | None = None
    _waiting: list[_Bucket] = field(default_factory=list)
    _joined: list[_Joined] = field(default_factory=list)

    def repeat(self, layout: Sequence[Sequence[str]]) -> None:
        """Average the next backward in this layout, whatever DDP's is."""
        self._repeat = [list(names) for names in layout] or None

    def take(self, tensors: dict[str, Tensor], flat: Tensor, last: bool, average: Average) -> Future[Tensor]:
        """Average one bucket; the future's value is `flat` with the means in it."""
        bucket = _Bucket(tensors, flat, new_future(flat) if flat.is_cuda else Future())
        self._waiting.append(bucket)
        enough = not flat.is_cuda or sum(b.flat.nbytes for b in self._waiting) >= TOGETHER_BYTES
        if last or (self._repeat is None and enough):
            self._submit(average)
        if last:
            self.layout, self._next_layout, self._repeat = self._next_layout, [], None
            del self._joined[len(self.layout) :]
            self.queue.flush()
        return bucket.future

    def _submit(self, average: Average) -> None:
        ready, self._waiting = self._waiting, []
        if self._repeat is not None:
            buckets = self._as_saved(ready, self._repeat)
        elif len(ready) == 1:
            buckets = [ready[0].tensors]
        else:
            buckets = [self._join([bucket.tensors for bucket in ready])]
        self._next_layout += [list(bucket) for bucket in buckets]
        exchanges = [average(bucket) for bucket in buckets]
        self.queue.submit_all(exchanges, self.phase, [b.flat for b in ready], [b.future for b in ready], self.quiet)

    def _join(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Join buckets that are averaged together: the same dict as in the last backward if its parts are the same."""
        index = len(self._next_layout)
        known = self._joined[index] if index < len(self._joined) else None
        if known is not None and len(known.parts) == len(parts) and all(map(is_, known.parts, parts)):
            return known.whole
        whole = {name: t for part in parts for name, t in part.items()}
        self._joined[index:] = [_Joined(parts, whole)]
        return whole

    @staticmethod
    def _as_saved(ready: Sequence[_Bucket], layout: list[list[str]]) -> list[dict[str, Tensor]]:
        tensors = {name: t for bucket in ready for name, t in bucket.tensors.items()}
        if sorted(tensors) != sorted(name for names in layout for name in names):
            return [bucket.tensors for bucket in ready]  # not the model that was saved: use its own layout
        return [{name: tensors[name] for name in names} for names in layout]


class BucketViews:
    """The gradients of DDP's buckets by name: the same dicts in every backward, as long as DDP keeps its memory.

    Making hundreds of views costs more time than averaging them. A view keeps its memory alive, so a known address
    means known memory.
    """

    def __init__(self, model_state: ModelState) -> None:
        self._model_state = model_state
        self._known: dict[int, tuple[int, Sequence[Tensor], dict[str, Tensor]]] = {}

    @property
    def names(self) -> set[str]:
        """The names of all gradients in the buckets of the last backward."""
        return {name for _, _, tensors in self._known.values() for name in tensors}

    def tensors(self, bucket: GradBucket) -> dict[str, Tensor]:
        """Return the bucket's gradients, by the name of their parameter."""
        params, address = bucket.parameters(), bucket.buffer().data_ptr()
        known = self._known.get(bucket.index())
        if known is not None:
            if known[0] == address and len(known[1]) == len(params) and all(map(is_, known[1], params)):
                return known[2]
            self._known.clear()  # DDP has rebuilt its buckets: release the old memory
        names = self._model_state.name_of
        tensors = {names[id(p)]: g for p, g in zip(params, gradients_of(bucket), strict=True)}
        self._known[bucket.index()] = (address, params, tensors)
        return tensors


def gradients_of(bucket: GradBucket) -> list[Tensor]:
    """View the gradients in a bucket, each in its parameter's memory layout; complex ones as real numbers.

    The buffer of complex parameters is real, and `bucket.gradients()` takes it for complex: their views are wrong.
    """
    params = [local_of(p) for p in bucket.parameters()]
    parts = bucket.buffer().split([p.numel() for p in params])
    return [as_laid_out(part.view(p.shape), p) for part, p in zip(parts, params, strict=True)]


def as_laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """View a gradient of a DDP bucket with its parameter's strides.

    DDP writes gradients in their parameters' memory layout, but shows a hook each as if it were row-major: of a
    transposed or channels_last parameter that is another matrix.
    """
    if parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return gradient  # DDP keeps permutations of row-major strides, and only those
    return gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())
