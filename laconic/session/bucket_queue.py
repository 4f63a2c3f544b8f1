"""DDP's buckets as they come, and the layout that a resumed run repeats.

DDP lays its buckets out anew after the first backward, by the order in which gradients arrived. A resumed run starts
with the old layout once more. Where the layout matters to the last bit (which sums share a message; what a batched
codec takes for one matrix), the first backward after loading is held back until all buckets are there, and then
averaged in the layout that was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING

from torch import Tensor
from torch.futures import Future

from laconic.comm.averaging import written
from laconic.comm.queue import CollectiveQueue, new_future
from laconic.comm.requests import Exchange

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

Begin = Callable[[Mapping[str, Tensor]], Exchange]
Named = Callable[[Sequence[Tensor], Sequence[Tensor]], dict[str, Tensor]]

TOGETHER_BYTES = 512 << 20
"""On CUDA, buckets are averaged together until they hold this much: launches cost more there than bytes."""


@dataclass(eq=False)
class BucketQueue:
    """Submits exchanges for buckets, in order: one each, or one for several on CUDA."""

    queue: CollectiveQueue
    layout: list[list[str]] = field(default_factory=list)
    """Names by exchange, as of the last backward."""
    phase: str = "gradient"
    quiet: bool = False
    """Whether errors are left for whoever steps the optimizer to find: DDP's backward cannot raise them as they are."""
    _coming: list[list[str]] = field(default_factory=list)
    _repeat: list[list[str]] | None = None
    _held: list[_Bucket] = field(default_factory=list)
    _joined: list[_Joined] = field(default_factory=list)

    def repeat(self, layout: Sequence[Sequence[str]]) -> None:
        """Average the next backward in this layout, whatever DDP's is."""
        self._repeat = [list(names) for names in layout] or None

    def take(self, tensors: dict[str, Tensor], flat: Tensor, last: bool, begin: Begin) -> Future[Tensor]:
        """Average one bucket; the future's value is `flat` with the means in it."""
        bucket = _Bucket(tensors, flat, new_future(flat))
        self._held.append(bucket)
        if last or (self._repeat is None and self._enough()):
            self._release(begin, last)
        if last:
            self.layout, self._coming, self._repeat = self._coming, [], None
            del self._joined[len(self.layout) :]
            self.queue.flush()
        return bucket.future

    def _enough(self) -> bool:
        last = self._held[-1].flat
        return not last.is_cuda or sum(b.flat.numel() * b.flat.element_size() for b in self._held) >= TOGETHER_BYTES

    def _release(self, begin: Begin, last: bool) -> None:
        held, self._held = self._held, []
        if self._repeat is None:
            buckets = [self._join([bucket.tensors for bucket in held])]
        else:
            buckets = self._as_saved({name: t for bucket in held for name, t in bucket.tensors.items()}, held)
        self._coming += [list(bucket) for bucket in buckets]
        exchanges = [written(begin(bucket), bucket) for bucket in buckets]
        values, futures = [b.flat for b in held], [b.future for b in held]
        self.queue.submit_all(exchanges, self.phase, values, futures, self.quiet)

    def _join(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Join what is averaged together: the very dict of the last backward if its parts are the same."""
        place = len(self._coming)
        known = self._joined[place] if place < len(self._joined) else None
        if known is not None and len(known.parts) == len(parts) and all(map(is_, known.parts, parts)):
            return known.whole
        whole = parts[0] if len(parts) == 1 else {name: t for part in parts for name, t in part.items()}
        self._joined[place:] = [_Joined(parts, whole)]
        return whole

    def _as_saved(self, tensors: dict[str, Tensor], held: Sequence[_Bucket]) -> list[dict[str, Tensor]]:
        assert self._repeat is not None
        if sorted(tensors) != sorted(name for names in self._repeat for name in names):
            return [bucket.tensors for bucket in held]  # another model than the saved one: its own layout then
        return [{name: tensors[name] for name in names} for names in self._repeat]


class BucketViews:
    """The gradients of DDP's buckets by name: the very same dicts from backward to backward, while DDP's memory stays.

    To make hundreds of views anew costs more time than to average them. A view keeps its memory, so an address that is
    known means the memory that is known.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, Sequence[Tensor], dict[str, Tensor]]] = {}

    def tensors(self, bucket: GradBucket, named: Named) -> dict[str, Tensor]:
        """Return the bucket's gradients, named by `named` from parameters and gradients where they are not known."""
        params, address = bucket.parameters(), bucket.buffer().data_ptr()
        known = self._known.get(bucket.index())
        if known is not None:
            if known[0] == address and len(known[1]) == len(params) and all(map(is_, known[1], params)):
                return known[2]
            self._known.clear()  # laid out anew: let go of the old memory
        tensors = named(params, bucket.gradients())
        self._known[bucket.index()] = (address, params, tensors)
        return tensors


@dataclass(frozen=True, eq=False)
class _Bucket:
    tensors: dict[str, Tensor]
    flat: Tensor
    future: Future[Tensor]


@dataclass(frozen=True, eq=False)
class _Joined:
    parts: list[dict[str, Tensor]]
    whole: dict[str, Tensor]
