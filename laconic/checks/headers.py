"""Headers: a row of numbers that each worker sends before weights, and before the gradients of a bare module.

Workers that are at different steps, under different plans or with different parameters get an error instead of a mean
of different things. All headers have the same length, whatever the model. Usually all workers state the
same, and one all_reduce of five numbers shows it. Only otherwise is the row of every worker gathered; where means are
weighted, it always is: it tells how many samples each worker has counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from laconic.checks.agreement import Facts, agree, digest_of
from laconic.comm.queue import CollectiveQueue
from laconic.errors import DesyncError, names, outliers
from laconic.exchange import Exchange, Gather, Max

NOT_COUNTED = -1
"""The count of a worker that has not called `session.weigh` though it had to."""
_BITS = 62
_MASK = (1 << _BITS) - 1


@dataclass(frozen=True)
class Header:
    """What one worker states.

    >>> header = Header(step=3, plan="ddp()", stop=True, step_ms=12)
    >>> Header.from_row(header.row().tolist(), header) == header
    True
    """

    step: int
    plan: str
    model: Facts = field(default_factory=lambda: Facts({}), compare=False)
    """The parameters and buffers that are averaged."""
    finite: bool = True
    stop: bool = False
    """Whether this worker was asked to stop."""
    with_gradient: int = 0
    """Bit i: parameter i has a gradient here."""
    step_ms: int = 0
    """How long a step takes on this worker; 0 if unknown."""
    count: int | None = None
    """How many samples this worker has counted, where means are weighted; or `NOT_COUNTED`."""
    taken: int | None = None
    """Of a round that ends by the clock, whose number is then `step`: how many steps this worker has taken in it."""

    def row(self) -> Tensor:
        """Return the numbers that are sent, int64."""
        same = (self.step, digest_of(self.plan), self.model.digest)
        own = (digest_of(str(self.with_gradient)), int(self.finite), int(self.stop), self.step_ms)
        told = [each for each in (self.count, self.taken) if each is not None]
        return torch.tensor([*same, *own, *told], dtype=torch.int64)

    def summary(self) -> Tensor:
        """Return five int64 numbers, of which workers compare the largest.

        The largest of a digest and of its complement are the ends of all workers' digests: the same if all state the
        same. The others say whether some worker is not finite, was asked to stop, and how long the slowest step takes.
        """
        same = digest_of(f"{self.step} {self.plan} {self.model.digest} {self.with_gradient}")
        return torch.tensor([same, ~same, not self.finite, self.stop, self.step_ms], dtype=torch.int64)

    @staticmethod
    def from_row(row: Sequence[int], like: Header) -> Header:
        """Read the row of a worker that is at the same step, under the same plan and with the same gradients."""
        finite, stop, step_ms, *told = row[4:]
        count = None if like.count is None else told[0]
        taken = None if like.taken is None else told[-1]
        return replace(like, finite=bool(finite), stop=bool(stop), step_ms=step_ms, count=count, taken=taken)

    @property
    def when(self) -> str:
        """The step, or the round."""
        return f"{'step' if self.taken is None else 'round'} {self.step}"


HEADER_BYTES = Header(step=0, plan="").summary().nbytes
"""What workers send each other before weights, and without DDP before gradients."""


@dataclass(frozen=True)
class Headers:
    """The headers of all workers, in their order; step, plan and model are the same in all.

    Where all workers state the same, `stop` and `step_ms` of every header are the largest of all workers.
    """

    all: tuple[Header, ...]

    @property
    def finite(self) -> list[bool]:
        """Whether each worker's tensors are finite."""
        return [header.finite for header in self.all]

    @property
    def stop(self) -> bool:
        """Whether any worker was asked to stop."""
        return any(header.stop for header in self.all)

    @property
    def with_gradient(self) -> int:
        """Bit i: parameter i has a gradient on some worker."""
        return reduce(or_, (header.with_gradient for header in self.all))

    @property
    def slowest_ms(self) -> int:
        """How long a step takes on the slowest worker; 0 if no worker knows."""
        return max(header.step_ms for header in self.all)

    @property
    def shares(self) -> tuple[float, ...] | None:
        """What the tensors of each worker are multiplied by, so that counts weigh their mean; 1 on average.

        None where means are not weighted, and where all weigh the same, as they do if all have counted 0. Workers whose
        tensors are not finite weigh 0.
        """
        if any(header.count is None for header in self.all):
            return None
        counts = [header.count or 0 if header.finite else 0 for header in self.all]
        if not any(counts):
            counts = [int(header.finite) for header in self.all]
        if len(set(counts)) == 1:
            return None
        return tuple(count * len(counts) / sum(counts) for count in counts)


def exchange_headers(queue: CollectiveQueue, header: Header, shards: CollectiveQueue | None = None) -> Headers:
    """Check that all workers are at the same step with the same plan and model, and return what they state.

    The workers that hold the `shards` of one replica state the same: that of any of them counts for all.
    """
    if shards is not None:
        bad, stop, step_ms = shards.largest(torch.tensor([not header.finite, header.stop, header.step_ms])).tolist()
        header = replace(header, finite=not bad, stop=bool(stop), step_ms=step_ms)
        if header.count is not None:  # what a replica has counted is what its workers have
            counts = shards.gather(torch.tensor(header.count))
            header = replace(header, count=NOT_COUNTED if NOT_COUNTED in counts else int(counts.sum()))
    alone = queue.workers == 1
    headers = Headers((header,)) if alone else _read(queue, header, queue.run(_exchange(queue, header), "control"))
    missing = [worker for worker, each in enumerate(headers.all) if each.count == NOT_COUNTED]
    if missing:
        raise RuntimeError(
            f"{header.when}: {names(missing, 'worker' if shards is None else 'replica')} ({queue.level}) counted "
            "nothing, and attach(..., weighted=True) weighs workers by what they count. Nothing was averaged.\n"
            "  Call session.weigh(n) with the samples or tokens of each step, on every worker, before its backward; "
            "weigh(0) in a step without data."
        )
    return headers


def start_headers(queue: CollectiveQueue, header: Header) -> Callable[[], Headers]:
    """Exchange headers while gradients are averaged; what is returned waits for them, after a flush of the queue."""
    started = queue.start(_exchange(queue, header), "control")
    return lambda: _read(queue, header, started.wait())


def _exchange(queue: CollectiveQueue, header: Header) -> Exchange[Headers | Tensor]:
    """Return the headers of all workers, if all state the same and are finite; else their rows, [workers, 7 to 9]."""
    if header.count is None:
        largest = (yield Max(header.summary().to(queue.device))).tolist()
        if largest[0] == ~largest[1] and not largest[2]:
            return Headers((replace(header, stop=bool(largest[3]), step_ms=largest[4]),) * queue.workers)
    return (yield Gather(header.row().to(queue.device))).cpu()


def _read(queue: CollectiveQueue, header: Header, found: Headers | Tensor) -> Headers:
    """Check the rows of all workers, if they were gathered."""
    if isinstance(found, Headers):
        return found
    rows: list[list[int]] = found.tolist()
    steps, plans, models, gradients = zip(*(row[:4] for row in rows), strict=True)
    # 1. all at the same step, under the same plan, with the same model
    shown, unit = "", header.when.split()[0]
    if len(set(steps)) > 1:
        usual, odd = outliers(steps)
        shown = f"{names(odd)} at {unit} {', '.join(str(steps[w]) for w in odd)} and the others at {unit} {usual}"
    elif len(set(plans)) > 1:
        shown = f"{names(outliers(plans)[1])} under another plan than the others; this one has {header.plan}"
    if shown:
        raise DesyncError(
            f"the workers are out of step ({queue.level}, {header.when} here): {shown}. Nothing was averaged.\n"
            "  All workers must load the same checkpoint, count the same steps (session.skip() for a step that a "
            "worker leaves out) and change plans together."
        )
    if len(set(models)) > 1:
        agree(queue, "what they train", header.model.stated)  # raises, and names the first difference
    # 2. what each states by itself; of which parameters it has gradients, where these are not the same on all
    headers = [Header.from_row(row, header) for row in rows]
    if len(set(gradients)) > 1:
        shifts = range(0, len(header.model.stated), _BITS)  # the bits of all parameters, as int64 words
        words = torch.tensor([header.with_gradient >> shift & _MASK for shift in shifts], dtype=torch.int64)
        all_words = queue.gather(words).tolist()
        bits = [sum(word << shift for word, shift in zip(each, shifts, strict=True)) for each in all_words]
        headers = [replace(each, with_gradient=some) for each, some in zip(headers, bits, strict=True)]
    return Headers(tuple(headers))
