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
from torch.futures import Future, collect_all

from laconic.averaging import written
from laconic.wires.group import Conductor
from laconic.wires.wire import Exchange

Begin = Callable[[Mapping[str, Tensor]], Exchange]


@dataclass(eq=False)
class BucketStream:
    """Submits one exchange a bucket, in order."""

    conductor: Conductor
    layout: list[list[str]] = field(default_factory=list)
    """Names by bucket, as of the last backward."""
    phase: str = "gradient"
    _coming: list[list[str]] = field(default_factory=list)
    _repeat: list[list[str]] | None = None
    _held: list[tuple[dict[str, Tensor], Tensor, Future[Tensor]]] = field(default_factory=list)

    def repeat(self, layout: Sequence[Sequence[str]]) -> None:
        """Average the next backward in this layout, whatever DDP's is."""
        self._repeat = [list(names) for names in layout] or None

    def take(self, tensors: dict[str, Tensor], flat: Tensor, last: bool, begin: Begin) -> Future[Tensor]:
        """Average one bucket; the future's value is `flat` with the means in it."""
        self._coming.append(list(tensors))
        if self._repeat is None:
            future = self.conductor.submit(written(begin(tensors), tensors), self.phase, flat)
        else:
            future = Future()
            self._held.append((tensors, flat, future))
        if last:
            self._end_backward(begin)
            self.conductor.flush()
        return future

    def _end_backward(self, begin: Begin) -> None:
        if self._repeat is not None:
            self._release(self._repeat, begin)
        self.layout, self._coming, self._repeat, self._held = self._coming, [], None, []

    def _release(self, layout: list[list[str]], begin: Begin) -> None:
        held = self._held
        tensors = {name: t for bucket, _, _ in held for name, t in bucket.items()}
        if sorted(tensors) != sorted(name for names in layout for name in names):
            layout = self._coming  # another model than the saved one: its own layout then
        else:
            self._coming = layout
        buckets = [{name: tensors[name] for name in names} for names in layout]
        futures = [self.conductor.submit(written(begin(bucket), bucket), self.phase, held[0][1]) for bucket in buckets]

        def resolve(done: Future[list[Future[Tensor]]]) -> None:
            for _, flat, future in held:
                try:
                    done.value()
                    future.set_result(flat)
                except Exception as error:
                    future.set_exception(error)  # type: ignore[arg-type]

        collect_all(futures).then(resolve)
