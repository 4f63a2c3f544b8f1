"""DDP's buckets as they come, and the layout that a resumed run repeats.

DDP lays its buckets out anew after the first backward, by the order in which gradients arrived. A resumed run starts
with the old layout once more. Where the layout matters to the last bit (which sums share a message; what a batched
codec takes for one matrix), the first backward after loading is held back until all buckets are there, and then
averaged in the layout that was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.futures import Future

from laconic.averaging import written
from laconic.wires.group import Conductor, new_future
from laconic.wires.wire import Exchange

Begin = Callable[[Mapping[str, Tensor]], Exchange]

TOGETHER_BYTES = 512 << 20
"""On CUDA, buckets are averaged together until they hold this much: launches cost more there than bytes."""


@dataclass(eq=False)
class BucketStream:
    """Submits exchanges for buckets, in order: one each, or one for several on CUDA."""

    conductor: Conductor
    layout: list[list[str]] = field(default_factory=list)
    """Names by exchange, as of the last backward."""
    phase: str = "gradient"
    quiet: bool = False
    """Whether errors are left for whoever steps the optimizer to find: DDP's backward cannot raise them as they are."""
    _coming: list[list[str]] = field(default_factory=list)
    _repeat: list[list[str]] | None = None
    _held: list[_Bucket] = field(default_factory=list)

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
            self.conductor.flush()
        return bucket.future

    def _enough(self) -> bool:
        last = self._held[-1].flat
        return not last.is_cuda or sum(b.flat.numel() * b.flat.element_size() for b in self._held) >= TOGETHER_BYTES

    def _release(self, begin: Begin, last: bool) -> None:
        held, self._held = self._held, []
        tensors = {name: t for bucket in held for name, t in bucket.tensors.items()}
        layout = [list(tensors)]
        if self._repeat is not None and sorted(tensors) == sorted(name for names in self._repeat for name in names):
            layout = self._repeat
        elif self._repeat is not None:  # another model than the saved one: its own layout then
            layout = [list(bucket.tensors) for bucket in held]
        self._coming += layout
        buckets = [{name: tensors[name] for name in names} for names in layout]
        exchanges = [written(begin(bucket), bucket) for bucket in buckets]
        values, futures = [b.flat for b in held], [b.future for b in held]
        self.conductor.submit_all(exchanges, self.phase, values, futures, self.quiet)


@dataclass(frozen=True, eq=False)
class _Bucket:
    tensors: dict[str, Tensor]
    flat: Tensor
    future: Future[Tensor]
