"""Headers: a row of numbers that each worker sends before weights, and before the gradients of a bare module.

Workers that are at different steps or under different plans get a `DesyncError` instead of a mean of different things.
Headers of all kinds have the same length in a session, so that any two of them can meet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from laconic.checks.errors import DesyncError
from laconic.checks.outliers import names, outliers
from laconic.comm.queue import CollectiveQueue
from laconic.comm.requests import Averaged, Exchange, Gather, true

_BITS = 62
_MASK = (1 << _BITS) - 1


@dataclass(frozen=True)
class Header:
    """What one worker states. `parameters` is how many the model has: it fixes the length.

    >>> header = Header(step=3, plan="ddp()", parameters=70, with_gradient=1 << 69, step_ms=12)
    >>> Header.from_row(header.row().tolist(), header) == header
    True
    """

    step: int
    plan: str
    parameters: int
    finite: bool = True
    stop: bool = False
    """Whether this worker was asked to stop."""
    with_gradient: int = 0
    """Bit i: parameter i has a gradient here."""
    step_ms: int = 0
    """How long a step takes on this worker; 0 if unknown."""

    def row(self) -> Tensor:
        """Return the numbers that are sent, int64: step, digest of the plan, flags, bits of gradients, duration."""
        words = -(-self.parameters // _BITS)
        bits = [self.with_gradient >> (_BITS * i) & _MASK for i in range(words)]
        return torch.tensor(
            [self.step, _digest(self.plan), int(self.finite), int(self.stop), *bits, self.step_ms], dtype=torch.int64
        )

    @staticmethod
    def from_row(row: Sequence[int], like: Header) -> Header:
        """Read the row of a worker that is at the same step and under the same plan as `like`."""
        _, _, finite, stop, *bits, step_ms = row
        with_gradient = sum(word << (_BITS * i) for i, word in enumerate(bits))
        return replace(like, finite=bool(finite), stop=bool(stop), with_gradient=with_gradient, step_ms=step_ms)


@dataclass(frozen=True)
class Headers:
    """The headers of all workers, in their order; step and plan are the same in all."""

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


def exchange_headers(queue: CollectiveQueue, header: Header) -> Headers:
    """Check that all workers are at the same step under the same plan, and return what they state."""
    return _checked(queue.gather(header.row()), header, queue.level)


class PendingHeaders:
    """Headers that are gathered while gradients are averaged. The queue must be flushed before `wait`."""

    def __init__(self, queue: CollectiveQueue, header: Header) -> None:
        self._headers: Headers | None = None

        def exchange() -> Exchange:
            rows = yield Gather(header.row().to(queue.device))
            self._headers = _checked(rows.cpu(), header, queue.level)
            return Averaged({}, dict, true)

        self._future = queue.submit(exchange(), "control", torch.empty(0))

    def wait(self) -> Headers:
        """Wait for the headers of all workers."""
        self._future.wait()
        assert self._headers is not None
        return self._headers


def _digest(plan: str) -> int:
    return int.from_bytes(hashlib.sha256(plan.encode()).digest()[:8], signed=True)


def _checked(rows: Tensor, mine: Header, level: str) -> Headers:
    table: list[list[int]] = rows.tolist()
    for column, what in ((0, "step"), (1, "plan")):
        values = [row[column] for row in table]
        if len(set(values)) > 1:
            raise DesyncError(_out_of_step(values, what, mine, level))
    return Headers(tuple(Header.from_row(row, mine) for row in table))


def _out_of_step(values: list[int], what: str, mine: Header, level: str) -> str:
    usual, odd = outliers(values)
    if what == "step":
        shown = f"{names(odd)} at step {', '.join(str(values[w]) for w in odd)} and the others at step {usual}"
    else:
        shown = f"{names(odd)} under another plan than the others; this one has {mine.plan}"
    return (
        f"the workers are out of step ({level}, step {mine.step} here): {shown}. Nothing was averaged.\n"
        "  All workers must load the same checkpoint, count the same steps (session.skip() for a step that a worker "
        "leaves out) and change plans together."
    )
